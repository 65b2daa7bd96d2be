"""A clock for tests that must not depend on real time."""


class Clock:
    """A clock that advances only when a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s
