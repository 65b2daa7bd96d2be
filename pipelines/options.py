"""The options of a pipeline run, rejected before anything runs. Imports no torch, so that `--help` is fast.

Groups of options are declared in the rooms that use them: `codes`, `data`, `tables` and `training` have an options.py,
the gate declares its bounds. The options of `tailrace pipeline` derive from these classes (infra/cli/options.py).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pipelines.codes.options import CodesOptions
from pipelines.data.options import CheckOptions, SplitKind
from pipelines.declaration import Option, check_bounds
from pipelines.evaluation.gate import GateOptions
from pipelines.foreign.options import ForeignOptions
from pipelines.tables.options import PLAIN, TableOptions
from pipelines.training.options import DEVICE_HELP, AdapterOptions, DeviceChoice, Reporting
from pipelines.training.workers.team import Team
from pipelines.wishes.options import WishOptions
from services.errors import ConfigError

if TYPE_CHECKING:
    from pipelines.training.recipes import Recipe

STAGE_NAMES = (
    *("ingest", "features", "tokenize", "import", "train", "distill", "sources", "evaluate", "gate"),
    *("refit", "similar", "wishes", "assemble", "precompute", "publish"),
)
_AFTER_GATE = ("refit", "similar", "wishes", "assemble", "precompute")
"""Stages of publishing runs only; "publish" itself is the default of `until`."""
ML_100K = "ml-100k"


def _shipped_recipes() -> "tuple[Recipe, ...]":
    from pipelines.training.recipes import read_recipes

    return read_recipes()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTables:
    """The user's own tables, which replace the data set."""

    events: Annotated[Path | None, Option("Your own events, as CSV, JSON or Parquet.")] = None
    items: Annotated[Path | None, Option("Your own items; without --events, the events come from the live log.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeOptions:
    """The precomputed lists."""

    num_users: Annotated[int, Option("Number of users with a stored list, the most active users.", at_least=1)] = 300
    list_len: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions(OwnTables):
    """Options of a run. `events` and `items` (both or none) replace the data set."""

    dataset: Annotated[str, Option("Name of a data set to download.")] = ML_100K
    with_live_log: Annotated[
        bool, Option("Also train on events received over Kafka.", names=("--live-log/--no-live-log",))
    ] = True
    model_name: Annotated[
        str,
        Option(
            "Name under which the bundle is promoted. TENANT.NAME trains on that tenant's events, and stores none of "
            "their histories. Stored lists belong to the default name.",
            names=("--name",),
        ),
    ] = "default"
    split: Annotated[
        str,
        Option(
            "How events are split: leave-one-out, or global-time, which trains on events before one cut "
            "and publishes nothing.",
            choices=tuple(SplitKind),
        ),
    ] = SplitKind.LEAVE_ONE_OUT
    first_bundle: Annotated[
        bool,
        Option("If no bundle is live, publish a bundle of the ingested items, without models, before training."),
    ] = False
    until: Annotated[str, Option("Stop after this stage.", choices=STAGE_NAMES)] = "publish"
    warm_start: Annotated[
        bool, Option("Start from the last full training's weights, with a quarter of the epochs.")
    ] = False
    device: Annotated[str, Option(DEVICE_HELP, choices=tuple(DeviceChoice))] = DeviceChoice.AUTO
    checkpoint_every_s: Annotated[
        float, Option("Seconds between checkpoints of a fit; a killed run resumes from the last.", at_least=0)
    ] = 60.0
    refit: Annotated[
        bool,
        Option("Let both models learn from all events after the gate; otherwise the evaluated pair is published."),
    ] = True
    force: Annotated[
        bool,
        Option("Publish a bundle that the gate or the data checks refuse, or that was withdrawn; this is audited."),
    ] = False
    replace_live: Annotated[
        bool,
        Option("Publish although the live bundle is of other data, without a comparison; this is audited."),
    ] = False
    codes: CodesOptions = field(default_factory=CodesOptions)
    foreign: ForeignOptions = field(default_factory=ForeignOptions)
    adapter: AdapterOptions = field(default_factory=AdapterOptions)
    team: Team = field(default_factory=Team)
    """The processes that fit the models. The result equals a single process's within the rounding of sums."""
    reporting: Reporting = field(default_factory=Reporting)
    """Where fits are reported, in addition to their stages' files."""
    checks: CheckOptions = field(default_factory=CheckOptions)
    wishes: WishOptions = field(default_factory=WishOptions)
    gate: GateOptions = field(default_factory=GateOptions)
    precompute: PrecomputeOptions = field(default_factory=PrecomputeOptions)
    tables: TableOptions = PLAIN
    """How the files of events and items are read."""
    recipes: "tuple[Recipe, ...]" = field(default_factory=_shipped_recipes)
    """Training recipes by the size of the data."""
    num_threads: int = 1
    """Threads of torch. One thread is far better than two on a shared machine, and gives the same weights
    everywhere."""
    llm_price_ndcg_per_ms: float = 0.001
    """Required NDCG gain per millisecond of the decoder's CPU time: the manifest lists the history lengths that reach
    it. `Settings` has the same default, and explains it."""

    def __post_init__(self) -> None:
        """Reject invalid options. Raises ConfigError naming the option, or InvalidRequest for the name."""
        from models.registry.name_record import check_name

        check_bounds(self)
        check_name(self.model_name)
        self._check_data()
        if self.until == "refit" and not self.refit:
            raise ConfigError("--until: --no-refit skips the stage refit; omit one of them")
        if self.split == SplitKind.GLOBAL_TIME:
            self._check_global_time()
        self.foreign.check_training(warm_start=self.warm_start, code_depth=self.codes.depth)
        self.adapter.check_training(
            others={
                "--warm-start": self.warm_start,
                "--code-depth": self.codes.depth is not None,
                "--decoder": bool(self.foreign.decoder),
                "--index": self.foreign.index is not None,
                "--workers": self.team.workers > 1,
                "--no-refit": not self.refit,
            }
        )
        self._check_machine()

    @property
    def data_name(self) -> str:
        """Name of the data: of the events' table, else of the items' table, else of the data set."""
        table = self.events or self.items
        return table.stem if table else self.dataset

    def _check_data(self) -> None:
        if self.dataset != ML_100K:
            raise ConfigError(f"--dataset: {self.dataset!r} is unknown; give {ML_100K}, or --events and --items")
        if self.events is not None and self.items is None:
            raise ConfigError("--events: --items is missing; give both, or only --items for the live log's events")
        if self.items is not None and self.events is None and not self.with_live_log:
            raise ConfigError("--no-live-log: --items has no events; give --events, or omit --no-live-log")

    def _check_machine(self) -> None:
        import torch

        from pipelines.training.fit.device import choose_device
        from pipelines.training.reports.watched import refuse_unreportable

        device, num_gpus = choose_device(self.device), torch.cuda.device_count()
        if self.team.workers > num_gpus and device.type == "cuda" and not self.team.ray:
            raise ConfigError(
                f"--workers: {self.team.workers} exceeds the {num_gpus} GPUs here; "
                f"give at most {num_gpus}, or --device cpu"
            )
        refuse_unreportable(self.reporting, device)

    def _check_global_time(self) -> None:
        if self.warm_start:
            raise ConfigError(
                f"--warm-start: the live bundle has learned from events after the cut of --split {self.split}; "
                "omit --warm-start"
            )
        for option, is_given in (("--force", self.force), ("--until", self.until in _AFTER_GATE)):
            if is_given:
                raise ConfigError(f"{option}: a run with --split {self.split} publishes nothing; omit one of them")
