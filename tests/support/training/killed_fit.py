"""Fit the decoder, the student or its twin, and kill this process before its nth step.

    python -m tests.support.training.killed_fit MODEL DATA FOLDER CHECKPOINT_EVERY_S STEP [ahead]

With `ahead` batches are prefetched in a thread, as for a GPU.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pipelines.runner.stage import silent
from pipelines.training.fit import prefetch
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.descent import Descent
from pipelines.training.train_decoder import train
from pipelines.training.train_student import Inputs, fit_and_save, without_targets
from tests.unit.pipelines.conftest import CPU, DROPPED_DECODER, DROPPED_STUDENT


def fit_one(model: str, folder: Path, checkpoints: Checkpoints) -> None:
    """Fit one model of the folder's data (`tokens`, and `decoder` as the teacher) into the checkpoints' folder."""
    out = checkpoints.folder.parent
    if model == "decoder":
        train(folder / "tokens", DROPPED_DECODER, out, checkpoints, CPU, silent)
        return
    options = DROPPED_STUDENT if model == "student" else without_targets(DROPPED_STUDENT)
    fit_and_save(
        Inputs(folder / "tokens", 1, CPU), folder / "decoder", options, out / "student.safetensors", checkpoints
    )


def kill_before(nth: int) -> None:
    """End this process at its nth step."""
    step, steps = Descent.step, 0

    def counted(self: Descent, *args: Any) -> float:
        nonlocal steps
        steps += 1
        if steps == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args)

    Descent.step = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    _, model, data, out, every_s, nth, *how = sys.argv
    kill_before(int(nth))
    if how == ["ahead"]:
        prefetch.is_worth_it = lambda _device: True
    fit_one(model, Path(data), Checkpoints(Path(out) / "saved", "train", float(every_s)))
