"""Many model names: one gateway over an object store with room for a few of them, and faults.

    python -m benchmarks.many --json OUT [--names 1000] [--room 50] [--requests 2000] [--cycles 1000]
    python -m benchmarks.many simulated --json OUT
    python -m benchmarks.many adapters --json OUT

The gateway runs in this process, without a broker, a feature store and an LLM, over an S3 server (SeaweedFS) that the
benchmark starts. Its students are made up; the bundles share their files by content. Rows: the start with all names
and with one; requests by Zipf's law, warm and cold; a hundred first calls of one name; memory over many loads and
unloads; cold names while the store is unavailable, slow, damaged or the disk is full. `simulated`
simulates a cluster with the product's state machines.
"""

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.faults.object_store import s3_server
from benchmarks.load.command import ReportOptions, about_run, exit_on_errors, run_named, write_report
from benchmarks.many.gateway import measure
from pipelines.declaration import Option, parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyOptions(ReportOptions):
    """Options of this benchmark."""

    names: Annotated[int, Option("Names in the object store.")] = 1_000
    room: Annotated[int, Option("Names that the gateway has memory for.")] = 50
    requests: Annotated[int, Option("Requests by Zipf's law.")] = 2_000
    cycles: Annotated[int, Option("Loads and unloads of the memory row.")] = 1_000


def main() -> None:
    """Measure, print each row, write the JSON after each."""
    options = parsed(ManyOptions, __doc__)
    with exit_on_errors(), tempfile.TemporaryDirectory() as folder, s3_server(Path(folder, "s3")) as url:
        asyncio.run(_run(options, f"{url}/many", Path(folder)))


async def _run(options: ManyOptions, url: str, folder: Path) -> None:
    report: dict[str, Any] = {**about_run("many"), "rows": []}
    async for row in measure(url, folder, options.names, options.room, options.requests, options.cycles):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        report["rows"].append(row)
        write_report(options.json, report)


if __name__ == "__main__":
    run_named({"simulated": "benchmarks.many.simulated", "adapters": "benchmarks.many.adapters"}, main)
