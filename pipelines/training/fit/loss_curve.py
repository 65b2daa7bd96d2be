"""Training loss of a fit by step in bounded memory. Pure.

Each point is the mean of `every` steps; `every` doubles whenever there are too many points.
"""

from dataclasses import dataclass, field

MAX_POINTS = 1_000


@dataclass(slots=True)
class LossCurve:
    """`means` cover `every` steps each, in order; `total` is the sum of the `number` steps since. JSON values only."""

    every: int = 1
    means: list[float] = field(default_factory=list)
    total: float = 0.0
    number: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.means) * self.every + self.number

    def add(self, loss: float) -> None:
        """Add the loss of the next step."""
        self.total += loss
        self.number += 1
        if self.number < self.every:
            return
        self.means.append(self.total / self.number)
        self.total, self.number = 0.0, 0
        if len(self.means) == MAX_POINTS:
            self.means = [(first + second) / 2 for first, second in zip(self.means[::2], self.means[1::2], strict=True)]
            self.every *= 2

    def points(self) -> list[tuple[int, float]]:
        """Return (last step, mean loss) of each point; the last point holds the remaining steps."""
        whole = [((index + 1) * self.every, mean) for index, mean in enumerate(self.means)]
        return [*whole, (self.num_steps, self.total / self.number)] if self.number else whole
