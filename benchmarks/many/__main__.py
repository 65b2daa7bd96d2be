"""Many model names: one gateway over an object store with room for a few of them, faults, and a simulated cluster.

    python -m benchmarks.many --json OUT [--names 1000] [--room 50] [--requests 2000] [--simulated-names 10000]

The gateway runs in this process, without a broker, a feature store and an LLM, over an S3 server (SeaweedFS) that the
benchmark starts. Its students are made up; the bundles share their files by content. Rows: the start with all names
and with one; requests by Zipf's law, warm and cold; a hundred first calls of one name; memory over many loads and
unloads; cold names while the store is unavailable, slow, damaged or the disk is full. The rows of the cluster are
simulated with the product's state machines.
"""

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.faults.object_store import s3_server
from benchmarks.load.command import ReportOptions, about_run, exit_on_errors, write_report
from benchmarks.many.gateway import measure
from benchmarks.many.simulated import simulate
from pipelines.declaration import Option, parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyOptions(ReportOptions):
    """Options of this benchmark."""

    names: Annotated[int, Option("Names in the object store.")] = 1_000
    room: Annotated[int, Option("Names that the gateway has memory for.")] = 50
    requests: Annotated[int, Option("Requests by Zipf's law.")] = 2_000
    cycles: Annotated[int, Option("Loads and unloads of the memory row.")] = 1_000
    simulated_names: Annotated[int, Option("Names of the simulated cluster; 0: no simulation.")] = 10_000
    simulated_replicas: Annotated[int, Option("Replicas of the simulated cluster.")] = 100


def main() -> None:
    """Measure, print each row, write the JSON."""
    options = parsed(ManyOptions, __doc__)
    rows = []
    with exit_on_errors(), tempfile.TemporaryDirectory() as folder, s3_server(Path(folder, "s3")) as url:
        rows += asyncio.run(
            measure(f"{url}/many", Path(folder), options.names, options.room, options.requests, options.cycles)
        )
    if options.simulated_names:
        rows += simulate(options.simulated_names, options.simulated_replicas, 120.0)
    for row in rows:
        sys.stdout.write(f"{row}\n")
    write_report(options.json, {**about_run("many"), "rows": rows})


if __name__ == "__main__":
    main()
