"""The first training of a stack without models, which runs while the stack starts and answers.

The pipeline publishes a bundle of the items before it trains, so that the stack answers popular and similar items.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from infra.local.supervisor.part import Part
from infra.local.supervisor.supervisor import Supervisor
from models.registry.store import BundleStore
from pipelines.options import ML_100K
from pipelines.runner.remaining import TRAINING
from services.errors import BundleError, BundleNotFound, EnvironmentFault
from services.settings.settings import Settings

TRAINING_PART = "pipeline"
_NICENESS = 10
"""The stack's processes get about nine times the CPU time of a training on the same core."""


def is_due(store: BundleStore) -> bool:
    """Return whether `tailrace up` trains: without a live bundle, or if it is the data set's first bundle.

    A shop's own items wait for events, and for `tailrace pipeline`.
    """
    if (version := store.live_version()) is None:
        return True
    try:
        live = store.open(version)
    except BundleError:  # the gateways report it
        return False
    return not live.is_trained and live.manifest.get("dataset") == ML_100K


def fault_of_live(store: BundleStore) -> str:
    """Return why the live bundle cannot be served; empty for a bundle that can be opened, and without one."""
    try:
        store.live()
    except BundleNotFound as error:
        version = store.live_version()
        return f"{version} is live, but {error}: `tailrace rollback --to VERSION` serves another" if version else ""
    except BundleError as error:
        return str(error)
    return ""


def pipeline_part(name: str) -> Part:
    """Return the offline pipeline with its defaults, for a name of bundles."""
    words = ("-m", "infra.cli.main", "pipeline", "--name", name, "--first-bundle")
    return Part(name=TRAINING_PART, command=(sys.executable, *words))


def log_of(settings: Settings) -> Path:
    """Return the file with the training's output."""
    return settings.state_dir / "logs" / "pipeline.log"


class FirstTraining:
    """Runs the training, and reports its estimates and its end."""

    def __init__(self, supervisor: Supervisor, settings: Settings, report: Callable[[str], None]) -> None:
        self._supervisor = supervisor
        self._store = BundleStore.of(settings, settings.first_name)
        self._log = log_of(settings)
        self._report = report
        self._num_read = self._log.stat().st_size if self._log.exists() else 0
        self.stage = "ready"
        """The stage of an answering stack: training, ready, or untrained after a failure."""

    def begin(self) -> None:
        """Start the training, and wait for its first bundle. Raises EnvironmentFault if it fails before."""
        self._report(f"training alongside the stack; its log is {self._log}")
        self._supervisor.begin(pipeline_part(self._store.name))
        self.stage = "training"
        while self._store.live_version() is None:
            self._supervisor.tick()
            self.observe()
            if self.stage == "untrained":
                raise EnvironmentFault(self._supervisor.why_down(TRAINING_PART))
        self._supervisor.lower_priority(TRAINING_PART, _NICENESS)  # so far the stack waited for it

    def observe(self) -> bool:
        """Report new estimates; return whether the training has just ended."""
        if self.stage != "training":
            return False
        code = self._supervisor.ended(TRAINING_PART)
        self._relay()
        if code is None:
            return False
        if code == 0:
            self.stage = "ready"
            self._report(f"training: done, {self._store.live_version()} is live")
        else:
            self.stage = "untrained"
            self._report(
                f"training: failed (code {code}), see {self._log}; the stack still answers popular and similar items, "
                "and `tailrace pipeline` trains again"
            )
        return True

    def _relay(self) -> None:
        """Report the estimates among the log's new lines."""
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._num_read)
            text = log.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._num_read += len(complete)
        for line in complete.decode(errors="replace").splitlines():
            if line.startswith(TRAINING):
                self._report(line)
