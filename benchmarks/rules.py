"""The cost of filters and rules: a request with and without them, the rule stage only, and expressions over many items.

    python -m benchmarks.rules --json OUT [--rounds 300] [--items 1000000] [--no-stack]

Requests without rules, with a surface's rules and with the same rules in the body alternate, one at a time over REST,
for each tier of a stack that the benchmark starts, with `llm_routing` at `always`. Everything else runs without a
stack: requests in this process, from the bytes of the body to the bytes of the answer; 200 candidates under all rules
at once; columns of `--items` items.
"""

import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import tomlkit
from google.protobuf.json_format import ParseDict

from benchmarks.load.audience import TIERS, Audience, find_audience
from benchmarks.load.clients import RequestFields, RestClient
from benchmarks.load.command import about_run, at_least_one, report_parser, write_report
from benchmarks.load.lone_plane import HIDDEN_SIZE, lone_plane
from benchmarks.load.open_loop import percentile
from benchmarks.load.own_stack import require_ready, stack_for
from benchmarks.scale.row import catalogue_of
from services.contracts import recommend_pb2 as pb
from services.contracts.access import ANYONE
from services.contracts.filters import Clause
from services.contracts.message import convert, decode, encode
from services.contracts.protobuf import message_of, parse_strictly, plain_of
from services.contracts.recommend import RecommendBody, RecommendRequest, Tier
from services.contracts.rules import Rules
from services.garbage import freeze_start
from services.gateway.data_plane import DataPlane
from services.gateway.ranking import ItemRanking, choose
from services.gateway.rules.slate import Known
from services.gateway.rules.stage import apply_rules
from services.items.expression import Expressions
from services.items.layout import ItemLayout
from services.router.deadline import Arrival
from services.settings.settings import Settings, load_settings

DEADLINE_MS = 1_000
NUM_WARM = 20
NUM_CANDIDATES, NUM_SHOWN, K = 200, 50, 10
NUM_ITEMS, NUM_VISITORS = 2_000, 50
NUM_EXPRESSIONS, NUM_STAGES = 40, 500
NOW_MS = 1_800_000_000_000
FILTERS = {
    "must": [{"key": "popularity", "range": {"gte": 0}}, {"key": "categories", "exists": True}],
    "must_not": [{"key": "popularity", "range": {"lt": 2}}],
}
RULES = {
    "boosts": [{"where": {"key": "popularity", "range": {"lt": 50}}, "factor": 1.5}],
    "caps": [{"attribute": "categories", "most": 4}],
    "diversity": 0.3,
    "decay": 0.8,
    "freshness": {"half_life_h": 72, "factor": 2},
}
SURFACE = "ruled"
KINDS: Mapping[str, RequestFields] = {
    "plain": {},
    "surface": {"surface": SURFACE},
    "body": {"filters": FILTERS, "rules": RULES},
}


def main() -> None:
    """Measure, print a table, write the JSON."""
    settings = load_settings()
    parser = report_parser(__doc__)
    parser.add_argument("--rounds", type=at_least_one, default=300, help="requests of each kind and tier")
    parser.add_argument(
        "--items", type=at_least_one, default=1_000_000, help="items that expressions are compiled over"
    )
    parser.add_argument("--no-stack", action="store_true", help="measure only what needs no stack")
    options = parser.parse_args()
    report: dict[str, Any] = {} if options.no_stack else {"requests": _measure_stack(settings, options.rounds)}
    report |= {
        "in_process": asyncio.run(measure_in_process(options.rounds)),
        "stage": measure_stage(),
        "expressions": measure_expressions(options.items),
    }
    for name in report.keys() - {"requests"}:
        print(name, report[name])
    write_report(options.json, about_run("rules") | report)


def _measure_stack(settings: Settings, num_rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "surfaces.toml")
        file.write_text(tomlkit.dumps({SURFACE: {"filter": FILTERS, "rules": RULES}}))
        changes = {"surfaces_file": file, "llm_routing": "always"}
        with stack_for(settings.model_copy(update=changes), is_started=True):
            return asyncio.run(_measure_requests(settings, num_rounds))


async def _measure_requests(settings: Settings, num_rounds: int) -> list[dict[str, Any]]:
    async with RestClient(settings.http_host, settings.http_port) as rest:
        await require_ready(rest)
        audience = await find_audience(rest)
        return [case for tier in TIERS if (case := await _case(rest, audience, tier, num_rounds)) is not None]


async def _case(rest: RestClient, audience: Audience, tier: str, num_rounds: int) -> dict[str, Any] | None:
    """Time rounds of requests, one of each kind. A round is discarded if another tier answered any of its requests."""
    asks = audience.asks(tier)
    if asks is None:
        print(f"{tier:12} no user for this tier", file=sys.stderr)
        return None
    rounds_ms = []
    for number in range(NUM_WARM + num_rounds):
        timed = [await _timed(rest, asks(number), extra) for extra in KINDS.values()]
        if number >= NUM_WARM and all(answered_by == tier for answered_by, _ in timed):
            rounds_ms.append([spent_ms for _, spent_ms in timed])
    if not rounds_ms:
        print(f"{tier:12} answered by other tiers", file=sys.stderr)
        return None
    case: dict[str, Any] = {"tier": tier, "num_rounds": len(rounds_ms)}
    for kind, of_kind_ms in zip(KINDS, zip(*rounds_ms, strict=True), strict=True):
        case |= {f"{kind}_p{share}_ms": round(percentile(of_kind_ms, share / 100), 3) for share in (50, 95)}
    for kind in ("surface", "body"):
        case[f"{kind}_over_plain_p50"] = round(case[f"{kind}_p50_ms"] / case["plain_p50_ms"], 3)
    print(case)
    return case


async def _timed(rest: RestClient, ask: RequestFields, extra: RequestFields) -> tuple[str, float]:
    started_s = time.perf_counter()
    outcome = await rest.recommend({**ask, **extra, "deadline_ms": DEADLINE_MS})
    return outcome.tier, 1_000 * (time.perf_counter() - started_s)


async def measure_in_process(num_rounds: int) -> list[dict[str, Any]]:
    """Time requests of anonymous visitors, whom the student answers, in the formats of both doors."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        pairs = tuple((f"c{number % 20}", f"c{number % 7}x") for number in range(NUM_ITEMS))
        catalogue = replace(catalogue_of(NUM_ITEMS), categories=pairs, popularity=np.arange(NUM_ITEMS, dtype=float))
        async with lone_plane(catalogue) as plane:
            freeze_start()
            return [await _door_case(plane, door, num_rounds) for door in ("rest", "grpc")]
    finally:
        structlog.reset_defaults()


async def _door_case(plane: DataPlane, door: str, num_rounds: int) -> dict[str, Any]:
    spent_ms: dict[str, list[float]] = {"plain": [], "body": []}
    for number in range(NUM_WARM + num_rounds):
        for kind, of_kind_ms in spent_ms.items():
            visitor = {"recent_item_ids": [f"item-{number % NUM_VISITORS:07d}"], "k": K, "request_id": f"r{number}"}
            body = visitor | KINDS[kind]
            sent = json.dumps(body).encode() if door == "rest" else _message(body)
            started_s = time.perf_counter()
            await _answer(plane, door, sent)
            of_kind_ms.append(1_000 * (time.perf_counter() - started_s))
        await asyncio.sleep(0)
    plain_ms, body_ms = (percentile(of_kind[NUM_WARM:], 0.5) for of_kind in spent_ms.values())
    case = {"plain_p50_ms": round(plain_ms, 3), "body_p50_ms": round(body_ms, 3)}
    return {"door": door, **case, "body_over_plain_p50": round(body_ms / plain_ms, 3)}


def _message(body: RequestFields) -> bytes:
    return ParseDict(body, pb.RecommendRequest()).SerializeToString()


async def _answer(plane: DataPlane, door: str, sent: bytes) -> bytes:
    arrival = Arrival(time.monotonic())
    if door == "rest":
        body = decode(RecommendBody, sent)
    else:
        body = convert(RecommendBody, plain_of(parse_strictly(pb.RecommendRequest, sent, len(sent))))
    answer = await plane.recommend(RecommendRequest.of(body, "", None), arrival, door, ANYONE)
    assert (answer.tier, len(answer.items)) == (Tier.STUDENT, K), answer
    return encode(answer) if door == "rest" else message_of(pb.RecommendResponse, answer).SerializeToString()


def measure_stage() -> dict[str, float]:
    """Time the stage over 200 candidates with every rule set, and the choice without rules."""
    scene = _Scene.of(NUM_ITEMS)
    rules = convert(Rules, {**RULES, "pins": [{"item_id": scene.items.item_id(7), "position": 2}]})
    drawn = np.random.default_rng(1).permutation(NUM_ITEMS)[:NUM_CANDIDATES]
    ranking = ItemRanking(Tier.STUDENT, drawn, np.linspace(0, -9, NUM_CANDIDATES))
    known = Known(
        expressions=scene.expressions.compiled([]),
        index=scene.items.index,
        showable=scene.items.columns.available.copy(),
        available=scene.items.columns.available,
        vectors=lambda indices: scene.vectors[indices],
        shown={scene.items.item_id(index): 3 for index in range(NUM_SHOWN)},
        now_ms=NOW_MS,
    )
    args = known.showable, NUM_CANDIDATES, known.available
    return {
        "num_candidates": NUM_CANDIDATES,
        "choose_ms": _median_ms(lambda: choose([ranking], *args), NUM_STAGES),
        "choose_and_rules_ms": _median_ms(
            lambda: apply_rules([ranking], rules, known, K, NUM_CANDIDATES, Tier.STUDENT), NUM_STAGES
        ),
    }


def measure_expressions(num_items: int) -> dict[str, float]:
    """Time expressions of four conditions over a catalogue: first use, cached, and after a change of one item."""
    scene = _Scene.of(num_items)
    clauses = [_expression(limit) for limit in range(NUM_EXPRESSIONS)]
    compiled_ms = [_median_ms(partial(scene.expressions.mask, clause), 1) for clause in clauses]
    kept = clauses[-1]
    prices, changed_ms = scene.items.columns.number("price"), []
    for number in range(NUM_EXPRESSIONS):
        prices.set(number, float(number))
        changed_ms.append(_median_ms(lambda: scene.expressions.mask(kept), 1))
    return {
        "num_items": num_items,
        "compile_p50_ms": round(percentile(compiled_ms, 0.5), 3),
        "compile_max_ms": round(max(compiled_ms), 3),
        "kept_ms": _median_ms(lambda: scene.expressions.mask(kept), NUM_STAGES),
        "after_a_change_ms": round(percentile(changed_ms, 0.5), 4),
    }


def _expression(limit: int) -> Clause:
    return Clause.read(
        {
            "must": [{"key": "price", "range": {"gte": limit, "lt": 80}}, {"key": "new", "eq": True}],
            "should": [{"key": "brand", "in": [f"b{number}" for number in range(limit, limit + 20)]}],
            "must_not": [{"key": "recalled", "exists": True}],
        }
    )


@dataclass(frozen=True, slots=True)
class _Scene:
    """Items with a vector each, and mostly a price, a brand, a flag and a time."""

    items: ItemLayout
    expressions: Expressions
    vectors: np.ndarray

    @classmethod
    def of(cls, num_items: int) -> "_Scene":
        draw, items = np.random.default_rng(0), ItemLayout(catalogue_of(num_items))
        columns = items.columns
        prices = np.where(draw.random(num_items) < 0.9, draw.random(num_items) * 100, np.nan)
        columns.number("price").numbers[:num_items] = prices
        columns.number("published_ms").numbers[:num_items] = NOW_MS - draw.random(num_items) * 1e9
        columns.flag("new").flags[:num_items] = draw.integers(-1, 2, num_items)
        columns.flag("recalled").flags[:num_items] = np.where(draw.random(num_items) < 0.01, 1, -1)
        brands = columns.text("brand")
        codes = np.array([brands.code((f"b{number}",)) for number in range(1_000)], dtype=np.int32)
        brands.codes[:num_items] = codes[draw.integers(0, 1_000, num_items)]
        categories = columns.text("categories")
        pairs = [categories.code((f"c{number}", f"c{number // 2}x")) for number in range(20)]
        categories.codes[:num_items] = np.array(pairs, dtype=np.int32)[draw.integers(0, 20, num_items)]
        vectors = draw.normal(size=(min(num_items, 10_000), HIDDEN_SIZE)).astype(np.float32)
        return cls(items, Expressions(items), vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _median_ms(work: Callable[[], object], num_times: int) -> float:
    spent_ms = []
    for _ in range(num_times):
        started_s = time.perf_counter()
        work()
        spent_ms.append(1_000 * (time.perf_counter() - started_s))
    return round(percentile(spent_ms, 0.5), 4)


if __name__ == "__main__":
    main()
