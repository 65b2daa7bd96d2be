"""Many model names over an object store: one gateway, then two LLM replicas, with room for a few names, and faults.

    python -m benchmarks.many --json OUT [--names 1000] [--room 50] [--requests 2000] [--cycles 1000]
                              [--rounds 5] [--part warm|import|gateway|replicas|deletion]
    python -m benchmarks.many simulated --json OUT
    python -m benchmarks.many adapters --json OUT

The gateway runs without a broker, a feature store and an LLM, over an S3 server (SeaweedFS) that the benchmark starts
at low priority. Its students are made up; the bundles share their files by content. `warm`: requests for names in
memory, while others load, beside one name's, at one rate and in turn, in several rounds. `import`: new items while
names in memory are requested. `gateway`: the start with all names and with one; requests by Zipf's law, warm and cold;
a hundred first calls of one name; memory over many loads and unloads; and all of it again while the store is
unavailable, slow (1 s a request), damaged, or the disk is full. The replicas are Ray's, with small random decoders:
first calls, memory and rankings over many loads and unloads, and in each fault a hot name, a killed replica, and a
rolling restart. `deletion`: a tenant of a whole stack with this settings' state is deleted, and every store scanned for
its ids. A part that fails is a row with its error. `simulated` simulates a cluster with the product's state
machines.
"""

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import structlog

from benchmarks.faults.object_store import s3_server
from benchmarks.load.command import ReportOptions, about_run, exit_on_errors, rows_on_file, run_named, write_report
from benchmarks.many.deletion import measure_deletion
from benchmarks.many.gateway import measure, measure_import
from benchmarks.many.replicas import measure_replicas
from benchmarks.many.rounds import measure_rounds
from pipelines.declaration import Option, parsed

_NICENESS = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyOptions(ReportOptions):
    """Options of this benchmark."""

    names: Annotated[int, Option("Names in the object store.")] = 1_000
    room: Annotated[int, Option("Names that the gateway has memory for.")] = 50
    requests: Annotated[int, Option("Requests by Zipf's law.")] = 2_000
    cycles: Annotated[int, Option("Loads and unloads of the memory rows.")] = 1_000
    rounds: Annotated[int, Option("Rounds of one name and many in turn.")] = 5
    part: Annotated[
        Literal["all", "warm", "import", "gateway", "replicas", "deletion"],
        Option("Rows to measure; others stay on file."),
    ] = "all"


def main() -> None:
    """Measure, print each row, write the JSON after each."""
    options = parsed(ManyOptions, __doc__)
    with exit_on_errors(), tempfile.TemporaryDirectory() as folder, s3_server(Path(folder, "s3"), _NICENESS) as url:
        asyncio.run(_run(options, url, Path(folder)))


async def _run(options: ManyOptions, url: str, folder: Path) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    parts = {
        "warm": measure_rounds(
            f"{url}/warm", folder / "rounds", options.names, options.room, options.requests, options.rounds
        ),
        "import": measure_import(f"{url}/import", folder / "import", options.names, options.room),
        "gateway": measure(f"{url}/many", folder, options.names, options.room, options.requests, options.cycles),
        "replicas": measure_replicas(f"{url}/replicas", folder / "replicas", options.cycles),
        "deletion": measure_deletion(f"{url}/deletion", folder / "deletion"),
    }
    asked = {name: rows for name, rows in parts.items() if options.part in (name, "all")}
    kept = [row for row in rows_on_file(options.json) if row.get("part", "all") not in {*asked, "all"}]
    report: dict[str, Any] = {**about_run("many"), "rows": kept}
    began_s = time.monotonic()
    for name, rows in asked.items():
        async for row in _until_failed(rows):
            sys.stdout.write(f"{time.monotonic() - began_s:6.0f} s  {row}\n")
            sys.stdout.flush()
            report["rows"].append({"part": name, **row})
            write_report(options.json, report)


async def _until_failed(rows: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Yield the rows, and a row with the error that ended them."""
    try:
        async for row in rows:
            yield row
    except Exception as error:  # noqa: BLE001 - the other part can still be measured
        yield {"row": "failed", "error": repr(error)}


if __name__ == "__main__":
    run_named({"simulated": "benchmarks.many.simulated", "adapters": "benchmarks.many.adapters"}, main)
