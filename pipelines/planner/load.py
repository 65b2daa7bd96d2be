"""Cores and memory of a load, computed from the results of `python -m benchmarks.plan capacity`. Pure.

Every constant except those below comes from the results file; `notes` lists estimates that are not measurements. The
formulas are in docs/capacity.md.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pipelines.declaration import Option, check_bounds
from pipelines.planner.names import resident_share
from services.errors import ConfigError

PARTS = ("edge", "gateway", "llm", "ray", "valkey", "broker", "worker", "metrics")
TIERS = ("precomputed", "llm", "student", "popular")
MAX_BUSY = 0.6
"""The planned utilisation of a core; the rest is for bursts, since waiting grows steeply beyond."""
_MOST = 10**15
MIX = "precomputed=0.5,llm=0.2,student=0.25,popular=0.05"
"""The default mix."""
PROMPT_ITEMS = 200
FLOAT_BYTES = 4
ADAPTER_RANK, ADAPTER_COPIES = 16, 2
"""An adapter of the default rank (TAILRACE_LLM_ADAPTER_RANK) is held in host memory and in a slot of its engine."""
LOADED_TIMES = 3.3
"""A further bundle's memory in a gateway, as a multiple of its student's file: 3.6 MB at 1,682 items."""

_BUSIEST = f"give the busiest time's value, at most {_MOST:,}"


def parse_mix(text: str) -> dict[str, float]:
    """Read `llm=0.3,student=0.7`; tiers not named have no share. Raises ConfigError naming the option."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        tier, _, share = part.strip().partition("=")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if tier not in TIERS or tier in mix or math.isnan(value):
            raise ConfigError(f"--mix: {part!r} is not TIER=FRACTION with a new tier; give such as llm=0.3,student=0.7")
        mix[tier] = value
    return dict.fromkeys(TIERS, 0.0) | mix


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The load to serve."""

    rate: Annotated[float, Option("Requests per second at peak.", at_least=1e-9, at_most=_MOST, fix=_BUSIEST)]
    users: Annotated[int, Option("Users in the feature store.", at_least=1, at_most=_MOST, fix=_BUSIEST)]
    items: Annotated[int, Option("Items in the catalogue.", at_least=1, at_most=_MOST, fix=_BUSIEST)]
    events_rate: Annotated[
        float | None,
        Option("Events per second.", at_least=0, at_most=_MOST, fix=_BUSIEST, shown="a tenth of --rate"),
    ] = None
    mix: Annotated[Mapping[str, float], Option("Fraction of requests per tier.", parse=parse_mix, shown=MIX)] = field(
        default_factory=lambda: parse_mix(MIX)
    )
    kv_users: Annotated[
        int, Option("Users whose context stays in the KV cache.", at_least=0, at_most=_MOST, fix=_BUSIEST)
    ] = 300
    names: Annotated[
        int, Option("Names of bundles that are served at once.", at_least=1, at_most=_MOST, fix=_BUSIEST)
    ] = 1
    resident_names: Annotated[
        int | None,
        Option(
            "Names whose models an LLM replica has memory for (TAILRACE_LLM_MEMORY_GIB).",
            at_least=1,
            at_most=_MOST,
            fix="give a number of names",
            shown="each name has replicas of its own",
        ),
    ] = None
    adapters_per_base: Annotated[
        int | None,
        Option(
            "Names whose bundles are adapters of one decoder, for each decoder: they share its weights.",
            at_least=1,
            at_most=_MOST,
            fix="give a number of names",
            shown="each name has weights of its own",
        ),
    ] = None
    zipf: Annotated[
        float, Option("Exponent of Zipf's law, by which names are asked for.", at_least=0, at_most=10, fix="give 1.0")
    ] = 1.0

    def __post_init__(self) -> None:
        """Validate the values. Raises ConfigError naming the option."""
        check_bounds(self)
        if not math.isclose(sum(self.mix.values()), 1.0, abs_tol=1e-6) or min(self.mix.values()) < 0:
            raise ConfigError(
                f"--mix: the fractions add up to {sum(self.mix.values()):g}; give fractions from 0 that add up to 1"
            )
        if self.adapters_per_base is not None and self.resident_names is None:
            raise ConfigError(
                "--adapters-per-base: names share a decoder only on shared replicas; add --resident-names"
            )

    @property
    def num_resident(self) -> int:
        """Names whose models a process holds."""
        return self.names if self.resident_names is None else min(self.names, self.resident_names)

    @property
    def num_decoders(self) -> int:
        """Decoders that these models need: of adapters at most one for each, as if all bases were in use."""
        return min(self.num_resident, math.ceil(self.names / (self.adapters_per_base or 1)))

    @property
    def events_per_s(self) -> float:
        """Events per second, a tenth of the requests unless given."""
        return self.rate / 10 if self.events_rate is None else self.events_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One kind of process: its busy cores, its replicas, and their total memory in MB."""

    part: str
    cores: float
    replicas: int
    memory_mb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Resources of a load, and their uncertainties."""

    lines: Sequence[Line]
    kv_num_blocks: int
    log_gb_per_day: float
    notes: Sequence[str]

    @property
    def cores(self) -> float:
        """Cores to provide, with room for bursts."""
        return sum(line.cores for line in self.lines) / MAX_BUSY

    @property
    def memory_gb(self) -> float:
        return sum(line.memory_mb for line in self.lines) / 1_024


def read_basis(path: Path | None) -> dict[str, Any]:
    """Read a results file of benchmarks.plan capacity, by default the repository's. Raises ConfigError."""
    chosen = path or Path(__file__).parents[2] / "benchmarks/results/capacity.json"
    try:
        basis: dict[str, Any] = json.loads(chosen.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--basis: {chosen} cannot be read ({error}); make it with python -m benchmarks.plan capacity"
        ) from error
    if not isinstance(basis, dict) or basis.get("benchmark") != "plan capacity":
        raise ConfigError(
            f"--basis: {chosen} is not a result of benchmarks.plan capacity; "
            "make it with python -m benchmarks.plan capacity"
        )
    try:
        plan(_TYPICAL, basis)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"--basis: {chosen} lacks a measurement or has a bad one ({error!r}); make it again with python -m "
            "benchmarks.plan capacity"
        ) from error
    return basis


def plan(demand: Demand, measured: Mapping[str, Any]) -> LoadPlan:
    """Compute the plan from a results file of benchmarks.plan capacity."""
    busy = _busy_cores(demand, measured)
    memory, bundle = measured["memory_mb"], measured["bundle"]
    blocks = kv_blocks(demand.kv_users)
    student_mb = _grown_mb(demand.items, bundle["num_items"], bundle["student_bytes"])
    other_name_mb = LOADED_TIMES * (bundle["student_bytes"] / 2**20 + student_mb)
    decoder_mb = bundle["decoder_bytes"] / 2**20 + _grown_mb(demand.items, bundle["num_items"], bundle["decoder_bytes"])
    per_replica_mb = {
        "gateway": memory["gateway"] + student_mb + (demand.num_resident - 1) * other_name_mb,
        "llm": memory["llm"]
        + _grown_mb(demand.items, bundle["num_items"], bundle["decoder_bytes"])
        + blocks * kv_block_bytes(bundle) / 2**20
        + (0 if demand.resident_names is None else (demand.num_decoders - 1) * decoder_mb)
        + (0 if demand.adapters_per_base is None else demand.num_resident * adapter_mb(bundle)),
    }
    lines = []
    for part in PARTS:
        scales = part in per_replica_mb
        replicas = max(1, math.ceil(busy[part] / MAX_BUSY)) if scales else 1
        if part == "llm" and demand.resident_names is None:  # each name has its own
            replicas = max(replicas, demand.names)
        mb = replicas * per_replica_mb[part] if scales else memory.get(part, 0.0)
        if part == "valkey":
            mb += store_mb(demand, measured)
        lines.append(Line(part=part, cores=busy[part], replicas=replicas, memory_mb=mb))
    log_gb_per_day = demand.events_per_s * 86_400 * measured["log_bytes_per_event"] / 1e9
    return LoadPlan(lines=lines, kv_num_blocks=blocks, log_gb_per_day=log_gb_per_day, notes=_notes(demand, measured))


def kv_block_bytes(bundle: Mapping[str, Any]) -> int:
    """Return the bytes of one KV block of 16 tokens: keys and values of all layers, as float32."""
    per_token = 2 * bundle["layers"] * bundle["kv_heads"] * bundle["head_dim"] * FLOAT_BYTES
    return int(per_token * 16)


def adapter_mb(bundle: Mapping[str, Any]) -> float:
    """Return an upper bound of an adapter's memory: a (n, m) matrix of the decoder gets rank * (n + m) numbers."""
    narrowest = min(bundle["hidden_size"], bundle["kv_heads"] * bundle["head_dim"])
    share = min(1.0, 2 * ADAPTER_RANK / narrowest)
    return float(ADAPTER_COPIES * share * bundle["decoder_bytes"] / 2**20)


def kv_blocks(users: int, prompt_tokens: int = PROMPT_ITEMS + 1, block_tokens: int = 16) -> int:
    """Return the blocks that keep the whole prompts of these users."""
    return users * math.ceil(prompt_tokens / block_tokens)


def store_mb(demand: Demand, measured: Mapping[str, Any]) -> float:
    """Return the online store's size: a history per user and, if the mix uses them, a list."""
    kinds = measured["store"]["by_kind"]
    per_user = kinds["history"]["mean_bytes"] + (_list_bytes(measured) if demand.mix["precomputed"] else 0)
    return float(demand.users * per_user / 2**20)


def _list_bytes(measured: Mapping[str, Any]) -> int:
    """Return the size of a stored list; 0 if the measured store had no lists."""
    return int(measured["store"]["by_kind"].get("list", {"mean_bytes": 0})["mean_bytes"])


def _busy_cores(demand: Demand, measured: Mapping[str, Any]) -> dict[str, float]:
    costs, events = measured["cpu_ms_per_request"], measured["cpu_ms_per_event"]
    head_ms = measured["head_ms_per_100k_items"] * max(0, demand.items - measured["bundle"]["num_items"]) / 100_000
    head_share = {"gateway": demand.mix["student"] + demand.mix["llm"], "llm": demand.mix["llm"]}
    busy = {}
    for part in PARTS:
        ms = sum(demand.mix[tier] * costs[tier].get(part, 0.0) for tier in TIERS) + head_ms * head_share.get(part, 0.0)
        idle_ms = measured["idle_cpu_ms_per_s"].get(part, 0.0)
        busy[part] = (idle_ms + demand.rate * ms + demand.events_per_s * events.get(part, 0.0)) / 1_000
    return busy


def _grown_mb(items: int, measured_items: int, weight_bytes: int) -> float:
    """Return the weights of the items beyond the measured catalogue, at the measured bytes per item."""
    return max(0, items - measured_items) * weight_bytes / measured_items / 2**20


_TYPICAL = Demand(
    rate=100.0,
    users=1_000,
    items=10**6,
    events_rate=10.0,
    mix={"precomputed": 0.25, "llm": 0.25, "student": 0.25, "popular": 0.25},
    kv_users=10,
)
"""A demand that needs every measurement."""


def _notes(demand: Demand, measured: Mapping[str, Any]) -> list[str]:
    machine, bundle = measured["machine"], measured["bundle"]
    basis = (
        f"Measured {measured['time']} on {machine['cpus']} {machine['arch']} cores with a decoder of "
        f"{bundle['layers']} layers"
        f" of {bundle['hidden_size']} over {bundle['num_items']} items, at a load average of "
        f"{measured['load_average_1m']:g}: on quiet cores it costs less,"
        " on other processors and with other models it differs. Measure yours:"
        " python -m benchmarks.plan capacity --json OUT, then --basis OUT."
    )
    notes = [basis]
    if demand.items > bundle["num_items"]:
        notes.append(
            f"Catalogues above {bundle['num_items']} items are reckoned: one product over all items in each model "
            f"({measured['head_ms_per_100k_items']} ms per 100,000 items, measured separately) and the weights' size."
        )
    if demand.items < bundle["num_items"]:
        notes.append(f"Catalogues below {bundle['num_items']} items are planned with that size.")
    if demand.mix["precomputed"]:
        notes.append(
            f"A list of {_list_bytes(measured)} bytes is counted for each user; the pipeline's default stores 300 "
            "lists."
        )
    if demand.resident_names is not None:
        share = resident_share(demand.names, demand.num_resident, demand.zipf)
        notes.append(
            f"Of the LLM's requests {share:.1%} find their model in memory and the student answers the rest, at most "
            f"{demand.rate * demand.mix['llm'] * (1 - share):.3g} loads a second, if one replica serves all names and "
            "a load takes no time; more replicas hold more names."
        )
        notes.append(
            "Each name has weights of its own; names that are adapters of one decoder take less: --adapters-per-base."
            if demand.adapters_per_base is None
            else f"{demand.num_decoders} decoders, each with {demand.adapters_per_base} names as adapters of rank "
            f"{ADAPTER_RANK}, which are counted by an upper bound. Loading an adapter takes less than a decoder."
        )
    elif demand.names > 1:
        notes.append(
            "Each name has LLM replicas of its own. During a release the candidate is loaded in addition to the "
            "live bundle."
        )
    if demand.rate > measured["rate"]:
        notes.append(
            f"CPU time per request was measured at {measured['rate']:g} requests a second and is taken to hold at "
            f"{demand.rate:g}."
        )
    return notes
