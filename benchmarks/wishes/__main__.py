"""Wishes under a deadline: the reader's time, requests with a wish, faults of the reader, and fuzzed wishes.

    python -m benchmarks.wishes --json OUT --state FOLDER [--seconds 60] [--fuzzed 100000]
    python -m benchmarks.wishes.quality ...    what the reader finds

The state folder holds the reader that `benchmarks.wishes.quality` made there. Requests go through a gateway's data
plane in this process, which is limited to one core; 20 different, new wishes a second. Fuzzed
wishes are drawn from the words of requests and of the catalogue and from arbitrary characters; one in 20 is read by the
encoder too.
"""

import asyncio
import logging
import os
import random
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog

from benchmarks.load.command import ReportOptions, about_run, exit_on_errors, newest_tokens, write_report
from benchmarks.load.lone_plane import lone_plane
from benchmarks.load.open_loop import Load, RequestOutcome, percentile, run_load, summary
from models.catalogue import Catalogue, load_catalogue
from models.wishes.language import english
from models.wishes.mixing import WISHES
from models.wishes.reader import Reader
from models.wishes.reading import Reading
from models.wishes.titles import natural_title
from models.wishes.vocabulary import WishItem
from pipelines.declaration import Option, parsed
from services.contracts.access import ANYONE
from services.contracts.recommend import MAX_WISH_CHARS, RecommendBody, RecommendRequest
from services.errors import ConfigError
from services.gateway.data_plane import DataPlane
from services.router.deadline import Arrival
from services.wishes.encoder import load_encoder

RATE_RPS, DEADLINE_MS = 20.0, 50
_FAULTS = ("slow", "failing", "missing")
_FAULT_S, _SLOW_S = 10.0, 0.5
_NUM_WARM, _ENCODED = 20, 20
_FUZZED_MS = 1_000
"""Deadline of a fuzzed wish, so that a slow machine reads it too."""
_LETTERS = "aäßéжあ中\u0301🎬'\"-,.;:!?()[]{}<>/\\\\&%$#@*+=~`^|_ 0123456789nonotbutwithoutlike"


@dataclass(frozen=True, slots=True, kw_only=True)
class WishesOptions(ReportOptions):
    """The options of this benchmark."""

    state: Annotated[Path, Option("Folder in which `benchmarks.wishes.quality` made a reader.")]
    seconds: Annotated[int, Option("Time of each measurement at a rate.", at_least=1)] = 60
    fuzzed: Annotated[int, Option("Number of fuzzed wishes.", at_least=0)] = 100_000


def main() -> None:
    """Measure on one core, print, write the JSON."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with exit_on_errors():
        options = parsed(WishesOptions, __doc__)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        catalogue = load_catalogue(newest_tokens(options.state) / "catalogue.parquet")
        folder = options.state / WISHES / WISHES
        if not folder.is_dir():
            raise ConfigError(f"--state: {folder} is missing; run `python -m benchmarks.wishes.quality --state` first")
        report = asyncio.run(measure(catalogue, folder, options.seconds, options.fuzzed))
    print(report)
    write_report(options.json, about_run("wishes") | {"num_items": len(catalogue.item_ids)} | report)


async def measure(catalogue: Catalogue, folder: Path, seconds: int, num_fuzzed: int) -> dict[str, Any]:
    """Return the figures of the reader, of requests, of faults, and of fuzzed wishes."""
    reader, texts = Reader.load(folder, catalogue, None, load_encoder), different_wishes(catalogue)
    num = int(seconds * RATE_RPS)
    for text in [next(texts) for _ in range(_NUM_WARM)]:
        reader.read(text)
    alone = await run_load(partial(_read, reader, [next(texts) for _ in range(num)]), RATE_RPS, num)
    requests = await _requests(catalogue, reader, [next(texts) for _ in range(num)])
    faults = {fault: await _fault(catalogue, reader, fault, texts) for fault in _FAULTS}
    words = Reader(reader.vocabulary)
    return {
        "reader": {f"p{share}_ms": _latency(alone, share) for share in (50, 99, 100)} | {"num_wishes": num},
        "requests": requests,
        "faults": faults,
        "fuzzed": await _fuzz(catalogue, words, reader, num_fuzzed),
    }


def different_wishes(catalogue: Catalogue) -> Iterator[str]:
    """Yield wishes of the catalogue's words, all different, in the phrasings of the quality benchmark."""
    phrasings: dict[str, Any] = tomllib.loads(Path(__file__).with_name("phrasings.toml").read_text())
    moods = [mood for of_value in phrasings.pop("moods").values() for mood in of_value]
    lines = [line for kind in phrasings.values() for phrasing in kind for line in phrasing.split("\n")]
    values = sorted({value.lower() for own in catalogue.categories for value in own})
    draw, seen = random.Random(0), set[str]()
    while True:
        (a, b, x), (m, n), title = draw.choices(values, k=3), draw.choices(moods, k=2), draw.choice(catalogue.titles)
        date = f"{draw.randrange(1920, 2000)}"
        text = draw.choice(lines).format(a=a, b=b, x=x, m=m, n=n, title=natural_title(title), date=date)
        text = f"{text} {draw.choice(values)} or {draw.choice(moods)}"[:MAX_WISH_CHARS]
        if text not in seen:
            seen.add(text)
            yield text


async def _read(reader: Reader, texts: Sequence[str], number: int) -> RequestOutcome:
    await asyncio.to_thread(reader.read, texts[number])
    return RequestOutcome(is_ok=True, tier="", reason="")


async def _requests(catalogue: Catalogue, reader: Reader, texts: Sequence[str]) -> dict[str, object]:
    """Send a request with each of these wishes; warm requests before are not counted."""
    async with lone_plane(catalogue, lambda _bundle, _catalogue: reader) as plane:
        for number in range(_NUM_WARM):
            await _send(plane, catalogue, [f"warm {number} {texts[number]}"], 0)
        load = await run_load(partial(_send, plane, catalogue, texts), RATE_RPS, len(texts))
    return summary(load, RATE_RPS, DEADLINE_MS)


async def _send(
    plane: DataPlane, catalogue: Catalogue, texts: Sequence[str], number: int, deadline_ms: int = DEADLINE_MS
) -> RequestOutcome:
    """Ask for an anonymous visitor with this wish."""
    item = catalogue.item_ids[number % len(catalogue.item_ids)]
    body = RecommendBody(recent_item_ids=(item,), wish=texts[number], deadline_ms=deadline_ms)
    arrival = Arrival(time.monotonic())
    answer = await plane.recommend(RecommendRequest.of(body, f"r{number}", None), arrival, "rest", ANYONE)
    return RequestOutcome(is_ok=bool(answer.items), tier=answer.tier, reason=answer.reason)


class _Faulty:
    """A reader that waits longer than any deadline, or raises."""

    def __init__(self, reader: Reader, fault: str) -> None:
        self._reader, self._fault = reader, fault
        self._gate = threading.Event()

    def read(self, text: str, session_wishes: Sequence[str] = ()) -> Reading:
        if self._fault == "failing":
            raise RuntimeError("the benchmark's fault")
        self._gate.wait(_SLOW_S)
        return self._reader.read(text, session_wishes)

    def with_items(self, items: Sequence[WishItem]) -> "_Faulty":
        return self


async def _fault(catalogue: Catalogue, reader: Reader, fault: str, texts: Iterator[str]) -> dict[str, object]:
    """Return the outcomes of requests with a wish under a fault."""
    own, faulty = [next(texts) for _ in range(int(_FAULT_S * RATE_RPS))], _Faulty(reader, fault)
    async with lone_plane(catalogue, lambda _bundle, _catalogue: None if fault == "missing" else faulty) as plane:
        load = await run_load(partial(_send, plane, catalogue, own), RATE_RPS, len(own))
    figures = summary(load, RATE_RPS, DEADLINE_MS)
    return {name: figures[name] for name in ("num_requests", "deadline_met", "p50_ms", "p99_ms", "p100_ms", "reasons")}


async def _fuzz(catalogue: Catalogue, words: Reader, whole: Reader, num: int) -> dict[str, Any]:
    """Answer fuzzed wishes one after another, and count the outcomes; any error ends the run."""
    reasons: Counter[str] = Counter()
    texts = fuzzed_wishes(catalogue)
    for reader, share in ((words, num - num // _ENCODED), (whole, num // _ENCODED)):
        async with lone_plane(catalogue, lambda _bundle, _catalogue, own=reader: own) as plane:  # type: ignore[misc]
            for _ in range(share):
                outcome = await _send(plane, catalogue, [next(texts)], 0, _FUZZED_MS)
                reasons[outcome.reason if outcome.is_ok else "no items"] += 1
    return {"num_wishes": num, "num_errors": 0, "num_encoded": num // _ENCODED, "reasons": dict(reasons)}


def fuzzed_wishes(catalogue: Catalogue) -> Iterator[str]:
    """Yield texts of arbitrary characters, and of words of requests, categories and titles in any order."""
    draw = random.Random(7)
    values = sorted({value for own in catalogue.categories for value in own})
    cues = [" ".join(cue) for cue in english().cues]
    marks = [",", ".", "?", ":", "-", "...", "but", "than", "rather", "1950s", "before 1980", "or later", '"']
    while True:
        if draw.random() < 0.3:
            text = "".join(draw.choice(_LETTERS) for _ in range(draw.randint(1, MAX_WISH_CHARS)))
        else:
            sources = (cues, values, marks, [draw.choice(catalogue.titles)], ["x" * draw.randint(1, 9)])
            text = " ".join(draw.choice(draw.choice(sources)) for _ in range(draw.randint(1, 40)))
        yield text[:MAX_WISH_CHARS].strip() or "-"


def _latency(load: Load, share: int) -> float:
    return round(percentile([shot.latency_ms for shot in load.shots], share / 100), 3)


if __name__ == "__main__":
    main()
