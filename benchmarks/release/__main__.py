"""Releases under load: time until a worse version is rolled back and an equal version promoted, losses.

    python -m benchmarks.release --json OUT [--rate 50] [--only CASE]

    cases             versions of the live bundle with a known fault, for half of the users, at `--rate` requests a
                      second over both doors

`python -m benchmarks.release simulated` simulates the analysis without a stack. Starts a separate stack, in
TAILRACE_STATE_DIR with its live bundle, and adds the versions to it.
"""

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

from benchmarks.load.clients import GrpcClient, RestClient
from benchmarks.load.command import about_run, above_zero, report_parser, run_named, write_report
from benchmarks.load.own_stack import stack_for
from benchmarks.release.candidates import make_candidates
from benchmarks.release.cases import CASES, SimulatedUsers, run_case, run_moves
from infra.local.supervisor.ports import of_running_stack
from models.registry.store import BundleStore
from services.settings.settings import Settings, load_settings

_LOOK_S = 15.0
_NUM_USERS = 943
"""Of MovieLens-100k, from 1 on."""


def main() -> None:
    """Measure, print lines, write the JSON."""
    parser = report_parser(__doc__)
    parser.add_argument("--rate", type=above_zero, default=50.0, help="requests a second")
    parser.add_argument("--only", default="", help="run only this case; moves: the last case; none: no case")
    options = parser.parse_args()
    settings = load_settings().model_copy(update={"release_look_s": _LOOK_S})
    report = about_run("release") | {"rate_rps": options.rate, "look_s": _LOOK_S}
    store = BundleStore.of(settings)
    versions = make_candidates(store)
    with stack_for(settings, is_started=True):
        report |= asyncio.run(_on_stack(of_running_stack(settings), store, versions, options))
    write_report(options.json, report)


async def _on_stack(
    settings: Settings, store: BundleStore, versions: Mapping[str, str], options: argparse.Namespace
) -> dict[str, Any]:
    rate, only = options.rate, options.only
    report: dict[str, Any] = {"cases": []}
    items = list(store.live().item_ids())
    async with (
        RestClient(settings.http_host, settings.http_port) as rest,
        GrpcClient(settings.grpc_address) as rpc,
    ):
        audience = SimulatedUsers(rest, rpc, [str(number) for number in range(1, _NUM_USERS + 1)], items)
        await audience.run(rate, 5.0)
        for case in CASES:
            if only in ("", case.name):
                report["cases"].append(await run_case(case, versions[case.candidate], store, settings, audience, rate))
        if only in ("", "moves"):
            report["cases"].append(await run_moves(versions["equal-2"], store, settings, audience, rate))
    return report


if __name__ == "__main__":
    run_named({"simulated": "benchmarks.release.simulated"}, main)
