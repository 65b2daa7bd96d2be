"""Published training runs from a CSV with the columns of llm-foundry's benchmark page, and the planner's predictions.

The models are MPT decoders, whose sizes follow from their names or, for other names, from the number of parameters. A
run's MFU counts 6 FLOPs per parameter and token, including embeddings, and attention over the full square:
12 x layers x hidden x length. Independent of the fit.
"""

import csv
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from models.errors import InvalidRequest
from pipelines.planner.devices import Device, Gpus, device_named
from pipelines.planner.mesh import ParallelLayout
from pipelines.planner.shapes import DecoderShape
from pipelines.planner.step_time import Constants, step_time
from services.errors import ConfigError

Value = TypeVar("Value")
Row = Mapping[str, str]
"""The text of each column."""
COLUMNS = (
    "Model",
    "SeqLen (T)",
    "# GPUs",
    "GPU",
    "MFU",
    "MicroBatchSize",
    "GradAccum",
    "Precision",
    "Sharding Strategy",
    "Activation Checkpointing",
    "NumParams",
)
"""The columns to read (HFU is ignored), in any order, capitalisation and punctuation."""
_VOCABULARY = 50_368
_SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1_024, 16),
    "760m": (24, 1_536, 12),
    "1b": (24, 2_048, 16),
    "3b": (32, 2_560, 20),
    "7b": (32, 4_096, 32),
    "13b": (40, 5_120, 40),
    "30b": (48, 7_168, 56),
    "70b": (80, 8_192, 64),
}
"""Layers, hidden size and heads of the MPT models (llm-foundry, scripts/train/yamls/pretrain)."""
_HIDDEN_PER_LAYER = 128
_DTYPES = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8", "fp32": "fp32"}
"""By the last word of a precision: the dtype whose rate applies to products."""
_SHARDING = {"FULL_SHARD": 2, "SHARD_GRAD_OP": 1, "NO_SHARD": 0}
"""How often weights are gathered for a micro-batch."""
_YES_NO = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_MFU_RANGE = (1.0, 100.0)
_CHECKPOINTING = "Activation Checkpointing"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One published run. `mfu` is in percent."""

    line: int
    model: str
    shape: DecoderShape
    device: Device
    num_gpus: int
    length: int
    micro_batch: int
    accumulation: int
    dtype: str
    gathers: int
    is_checkpointed: bool
    num_parameters: int
    mfu: float

    @property
    def key(self) -> str:
        """A hash of the run's configuration and result, independent of file, line and number format."""
        sizes = (self.num_gpus, self.length, self.micro_batch, self.accumulation, self.num_parameters)
        facts = (self.model, self.device.name, *sizes, self.dtype, self.gathers, self.is_checkpointed, self.mfu)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    @property
    def layout(self) -> ParallelLayout:
        """The run's layout: states sharded over all GPUs, or replicated."""
        is_sharded = self.gathers > 0
        return ParallelLayout(
            data=1 if is_sharded else self.num_gpus,
            shard=self.num_gpus if is_sharded else 1,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            checkpointing="full" if self.is_checkpointed else "none",
        )


@dataclass(frozen=True, slots=True)
class BadRow:
    """An unreadable row, and why."""

    line: int
    problem: str


@dataclass(frozen=True, slots=True)
class Predicted:
    """MFU in percent, and the interval that contains most runs."""

    mfu: float
    low: float
    high: float


def read_runs(path: Path) -> tuple[list[PublishedRun], list[BadRow]]:
    """Read a file. Unusable rows come back with the reason. Raises ConfigError for a file without the columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = {_plain(name): name for name in reader.fieldnames or () if name}
            missing = [column for column in COLUMNS if _plain(column) not in names]
            if missing:
                raise ConfigError(f"--runs: {path} has no column {', '.join(missing)}; it needs {', '.join(COLUMNS)}")
            rows = [
                (reader.line_num, {column: (row[names[_plain(column)]] or "").strip() for column in COLUMNS})
                for row in reader
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--runs: {path} cannot be read ({error}); give a CSV file") from error
    runs, bad = [], []
    for line, row in rows:
        try:
            runs.append(_run_of(line, row))
        except ValueError as error:
            bad.append(BadRow(line, str(error)))
    return runs, bad


def predict(run: PublishedRun, constants: Constants | None = None) -> Predicted:
    """Return the planner's MFU for a run, counted as on the page. Gradients are communicated in bf16 there."""
    gpus, gathers = Gpus(run.device, run.num_gpus), max(run.gathers, 1)
    step = step_time(
        run.shape, run.layout, run.length, gpus, dtype=run.dtype, reduce_bytes=2, gathers=gathers, constants=constants
    )
    return Predicted(*(published_mfu(run, seconds) for seconds in (step.total_s, step.high_s, step.low_s)))


def published_mfu(run: PublishedRun, seconds: float) -> float:
    """Return the MFU in percent of a step of this duration."""
    shape = run.shape
    per_token = 6 * run.num_parameters + 12 * shape.num_layers * shape.hidden_size * run.length
    flops = run.layout.batch * run.length * per_token
    return 100 * flops / (seconds * run.num_gpus * run.device.flops_per_s[run.dtype])


def _run_of(line: int, row: Row) -> PublishedRun:
    """Read one row. Raises ValueError naming the column."""
    device, precision = _device(row, "GPU"), row["Precision"].lower().replace("-", "_")
    dtype = _one_of(row, "Precision", _DTYPES, precision.rpartition("_")[2])
    if dtype not in device.flops_per_s:
        raise ValueError(f"Precision: {device.name} has no products in {dtype}")
    num_parameters, length = _count(row, "NumParams"), _count(row, "SeqLen (T)")
    return PublishedRun(
        line=line,
        model=row["Model"],
        shape=_shape_of(row["Model"], num_parameters, length),
        device=device,
        num_gpus=_count(row, "# GPUs"),
        length=length,
        micro_batch=_count(row, "MicroBatchSize"),
        accumulation=_count(row, "GradAccum"),
        dtype=dtype,
        gathers=_one_of(row, "Sharding Strategy", _SHARDING, row["Sharding Strategy"].upper()),
        is_checkpointed=_one_of(row, _CHECKPOINTING, _YES_NO, row[_CHECKPOINTING].lower()),
        num_parameters=num_parameters,
        mfu=_percent(row, "MFU"),
    )


def _shape_of(name: str, num_parameters: int, length: int) -> DecoderShape:
    """Return the shape of the MPT model of this name, or of this size with hidden size 128 times the layers."""
    layers, hidden, heads = _SHAPES.get(name.lower().removeprefix("mpt-"), (0, 0, 0))
    if not layers or not 0.8 < num_parameters / _parameters(layers, hidden, length) < 1.25:
        layers = max(1, round((num_parameters / 12 / _HIDDEN_PER_LAYER**2) ** (1 / 3)))
        hidden = layers * _HIDDEN_PER_LAYER
        heads = layers
    return DecoderShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        ffn_matrices=2,
        vocab_size=_VOCABULARY,
        num_positions=length,
    )


def _parameters(layers: int, hidden: int, length: int) -> int:
    return 12 * layers * hidden**2 + (_VOCABULARY + length) * hidden


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _count(row: Row, column: str) -> int:
    value = _number(row[column].replace(",", "").replace("_", ""))
    if not (1 <= value < 1e15 and value.is_integer()):
        raise ValueError(f"{column}: {row[column]!r} is not a whole number from 1")
    return int(value)


def _percent(row: Row, column: str) -> float:
    value, (low, high) = _number(row[column].removesuffix("%")), _MFU_RANGE
    if not low <= value <= high:
        raise ValueError(f"{column}: {row[column]!r} is not a percentage from {low:g} to {high:g}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _device(row: Row, column: str) -> Device:
    try:
        return device_named(row[column], column)
    except InvalidRequest as error:
        raise ValueError(error.summary) from error


def _one_of(row: Row, column: str, values: Mapping[str, Value], word: str) -> Value:
    if word not in values:
        raise ValueError(f"{column}: {row[column]!r} is none of {', '.join(values)}")
    return values[word]
