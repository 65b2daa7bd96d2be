"""The options that the benchmarks of quality share, and a store of a run's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.load.command import ReportOptions
from infra.local.supervisor.ports import free_window
from pipelines.declaration import Option
from services.settings.settings import Settings

SEQUENCES = Option("Folder of sequences of items by user, in time order (benchmarks/quality/sequences.py).")
SEEDS = Option("Number of seeds, from 0.", at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions(ReportOptions):
    """A benchmark that reuses stage outputs."""

    state: Annotated[
        Path | None, Option("Folder of stage outputs, store and models.", shown="quality in the state folder")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions(StateOptions):
    """A benchmark that trains on a data set."""

    sequences: Annotated[Path | None, SEQUENCES] = None
    epochs: Annotated[int | None, Option("Epochs of each model.", at_least=1, shown="the recipe's")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededOptions(TrainingOptions):
    """A benchmark that trains with several seeds."""

    seeds: Annotated[int, SEEDS] = 3


def with_own_store(settings: Settings, state_dir: Path | None) -> Settings:
    """Return the settings with a state folder and a separate embedded store: a stack's store may hold other users."""
    own = (state_dir or settings.state_dir / "quality").absolute()
    address = {"redis_host": "127.0.0.1", "redis_port": free_window(1, seed=str(own)), "redis_tls_ca_file": None}
    return settings.model_copy(update={"state_dir": own, "cache_dir": settings.cache_dir.absolute()} | address)
