"""Options of a pipeline run, and the locations of its files. Rejects wrong options before anything runs."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from models.name_record import DEFAULT_NAME, check_name
from pipelines.codes.options import CodesOptions
from pipelines.data.checks import CheckOptions
from pipelines.data.examples import SplitKind
from pipelines.evaluation.gate import GateOptions
from pipelines.tables.options import PLAIN, TableOptions
from pipelines.training.fit.device import DeviceChoice, choose_device
from pipelines.training.fit.watch import Reporting
from pipelines.training.parallel.mesh import BUCKET_MB
from pipelines.training.recipes import Recipe, read_recipes
from pipelines.training.reports.watched import refuse_unreportable
from pipelines.training.workers.team import Team
from services.contracts.event_roles import DEFAULT_ROLES, EventRoles, read_event_roles
from services.errors import ConfigError
from services.features.repo import RepoAddress
from services.settings.settings import Settings

STAGE_NAMES = (
    *("ingest", "features", "tokenize", "train", "distill", "evaluate", "gate"),
    *("refit", "similar", "assemble", "precompute", "publish"),
)
_AFTER_GATE = ("refit", "similar", "assemble", "precompute")
"""Stages of publishing runs only; "publish" itself is the default of `until`."""
ML_100K = "ml-100k"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecomputeOptions:
    """Number of users with a precomputed list, and its maximum length."""

    num_users: int = 300
    list_len: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Options of a run. `events` and `items` (both or none) replace the data set.

    `until` ends the flow after that stage.
    """

    dataset: str = ML_100K
    model_name: str = DEFAULT_NAME
    """Name under which the bundle is promoted. Stored lists, one per user, belong to the default name."""
    events: Path | None = None
    items: Path | None = None
    tables: TableOptions = PLAIN
    """How the files of events and items are read."""
    with_live_log: bool = True
    split: str = SplitKind.LEAVE_ONE_OUT
    """How events are split. A global-time run ends after the gate: it evaluates, and publishes nothing."""
    until: str = "publish"
    num_threads: int = 1
    """Threads of torch. One thread is far better than two on a shared machine, and gives the same weights
    everywhere."""
    warm_start: bool = False
    """Start from the last whole training's weights, with a quarter of the epochs."""
    device: str = DeviceChoice.AUTO
    workers: int = 1
    """Number of processes that fit each model. The result equals a single process's within the rounding of sums."""
    parallel: str = "auto"
    """How the decoder is laid out over the workers (training/parallel/layout.py)."""
    precision: str = "auto"
    """Data type of matrix products in training: fp32, bf16, or auto, which is bf16 on a GPU."""
    recompute: str = "none"
    """Activations of each layer that are recomputed in the backward pass: none, selective or full."""
    bucket_mb: float = BUCKET_MB
    """Size of DDP's gradient buckets in MiB."""
    compression: str = "none"
    """How DDP encodes gradients: none (fp32), bf16, fp16 or powersgd."""
    ray: str = ""
    """Address of a Ray cluster used only for training, whose machines run the workers; empty: this machine, without
    Ray."""
    worker_timeout_s: float = 600.0
    """Seconds without an answer after which a worker is terminated, and all resume from the last checkpoint."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's files of each fit."""
    mlflow: str = ""
    """Address of an MLflow tracking server that each fit is reported to."""
    memory_snapshot: Path | None = None
    """Folder for the GPU allocator's history of each fit."""
    checkpoint_every_s: float = 60.0
    """Interval at which a fit saves its state; a killed run resumes from there."""
    codes: CodesOptions = field(default_factory=CodesOptions)
    recipes: tuple[Recipe, ...] = field(default_factory=read_recipes)
    """Training recipes by the size of the data."""
    checks: CheckOptions = field(default_factory=CheckOptions)
    gate: GateOptions = field(default_factory=GateOptions)
    llm_price_ndcg_per_ms: float = 0.001
    """Required NDCG gain per millisecond of the decoder's CPU time: the manifest lists the history lengths that reach
    it. `Settings` has the same default, and explains it."""
    force: bool = False
    """Publish in spite of violations of the gate or the data checks, or a withdrawal; the manifest lists the
    violations."""
    replace_live: bool = False
    """Publish although the live bundle is of other data, so that nothing can be compared."""
    refit: bool = True
    """Whether both models learn from all events after the gate. Without it, the judged pair is published."""
    precompute: PrecomputeOptions = field(default_factory=PrecomputeOptions)

    def __post_init__(self) -> None:
        """Reject invalid options. Raises ConfigError naming the option, or InvalidRequest for the name."""
        check_name(self.model_name)
        if self.dataset != ML_100K:
            raise ConfigError(
                f"--dataset: {self.dataset!r} is not known, only {ML_100K!r}; or give --events and --items"
            )
        if self.events is not None and self.items is None:
            raise ConfigError(
                "--events: --items is missing; give both, or --items alone for the events of the live log"
            )
        if self.items is not None and self.events is None and not self.with_live_log:
            raise ConfigError("--no-live-log: leaves --items without events; give --events, or leave it out")
        if self.until not in STAGE_NAMES:
            raise ConfigError(f"--until: {self.until!r} is no stage; the stages are {', '.join(STAGE_NAMES)}")
        if self.until == "refit" and not self.refit:
            raise ConfigError("--until refit: a run with --no-refit has no such stage; leave one of them out")
        if self.split not in list(SplitKind):
            raise ConfigError(f"--split: {self.split!r} is not known; give {' or '.join(SplitKind)}")
        if self.split == SplitKind.GLOBAL_TIME:
            self._check_global_time()
        if not self.checkpoint_every_s >= 0:
            raise ConfigError(
                f"--checkpoint-every-s: {self.checkpoint_every_s} is no time; give 0 or more seconds, such as 60"
            )
        self._check_workers()
        refuse_unreportable(self.reporting, choose_device(self.device))

    @property
    def reporting(self) -> Reporting:
        """Where fits are reported, in addition to their stages' files."""
        return Reporting(
            tensorboard_dir=self.tensorboard, mlflow_uri=self.mlflow, memory_snapshot_dir=self.memory_snapshot
        )

    @property
    def team(self) -> Team:
        """The processes that fit the models."""
        return Team(
            workers=self.workers,
            parallel=self.parallel,
            precision=self.precision,
            recompute=self.recompute,
            bucket_mb=self.bucket_mb,
            compression=self.compression,
            timeout_s=self.worker_timeout_s,
            ray=self.ray,
        )

    @property
    def data_name(self) -> str:
        """Name of the data: of the events' table, else of the items' table, else of the data set."""
        table = self.events or self.items
        return table.stem if table else self.dataset

    def _check_workers(self) -> None:
        device, num_gpus = choose_device(self.device), torch.cuda.device_count()
        if self.team.workers > num_gpus and device.type == "cuda" and not self.ray:
            raise ConfigError(
                f"--workers: {self.workers} on a machine of {num_gpus} GPUs; give at most {num_gpus}, or --device cpu"
            )

    def _check_global_time(self) -> None:
        if self.warm_start:
            raise ConfigError(
                f"--warm-start: the live bundle has learned from events after the cut; leave it out with --split {self.split}"
            )
        for option, is_given in (("--force", self.force), (f"--until {self.until}", self.until in _AFTER_GATE)):
            if is_given:
                raise ConfigError(f"{option}: a run with --split {self.split} publishes nothing; leave one of them out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders, addresses and limits of a run."""

    state_dir: Path
    cache_dir: Path
    bundle_root: Path
    offline_log_dir: Path
    feature_repo: RepoAddress
    history_max_items: int
    keep_bundles: int
    event_roles: EventRoles = DEFAULT_ROLES
    bundle_store: str = ""
    bundle_cache_gib: float = 20.0

    @classmethod
    def from_settings(cls, settings: Settings) -> "Places":
        """Return a run's places from the settings; paths stay as they are. Raises ConfigError for a bad events file."""
        return cls(
            state_dir=settings.state_dir,
            cache_dir=settings.cache_dir,
            bundle_root=settings.bundle_root,
            offline_log_dir=settings.offline_log_dir,
            feature_repo=RepoAddress(settings.feature_repo_dir, settings.redis_address),
            history_max_items=settings.history_max_items,
            keep_bundles=settings.keep_bundles,
            event_roles=read_event_roles(settings.events_file),
            bundle_store=settings.bundle_store,
            bundle_cache_gib=settings.bundle_cache_gib,
        )

    @property
    def stages_dir(self) -> Path:
        """The folder of stage outputs."""
        return self.state_dir / "pipeline"
