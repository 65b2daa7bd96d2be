"""Estimates the duration of a run's fits from the epochs of the decoder. Pure: the clock is an argument."""

from collections.abc import Container
from dataclasses import dataclass

TRAINING = "training: "
"""The start of a line that reports an estimate."""
_EVERY_S = 60.0
FITS = {"train": 1.0, "distill": 1.0, "refit": 0.9}
"""Durations of the stages that fit models, in durations of `train`, as measured on MovieLens-100k."""


@dataclass(slots=True)
class RemainingTime:
    """The remaining time of a run's fits. It assumes that stages take the same multiples of each other on all data.

    `stages` has the names of the run's stages.
    """

    stages: Container[str] = tuple(FITS)
    _stage: str = ""
    _began_s: float = 0.0
    _said_s: float = float("-inf")
    _train_s: float | None = None

    def begin(self, stage: str, now_s: float) -> None:
        self._stage, self._began_s = stage, now_s

    def end(self, seconds: float) -> None:
        """Note that the stage has ended, after working for these seconds."""
        if self._stage in FITS and seconds:
            self._train_s = seconds / FITS[self._stage]

    def line(self, done: int, total: int, now_s: float) -> str:
        """Return a line with the estimate after an epoch, at most once a minute; else ""."""
        if self._stage not in FITS or not 0 < done < total or now_s - self._said_s < _EVERY_S:
            return ""
        spent_s = now_s - self._began_s
        train_s = self._train_s or spent_s * total / done / FITS[self._stage]
        names = list(FITS)
        in_all_s = train_s * sum(FITS[name] for name in names[names.index(self._stage) :] if name in self.stages)
        is_first, self._said_s = self._said_s < 0, now_s
        return f"{TRAINING}about {_minutes(in_all_s if is_first else in_all_s - spent_s)} " + (
            "in all" if is_first else "left"
        )


def _minutes(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} minute{'' if minutes == 1 else 's'}"
