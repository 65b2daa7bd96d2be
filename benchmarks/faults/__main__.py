"""The fault matrix: what callers see while one part after another fails, on a separate stack behind faulty connections.

    python -m benchmarks.faults --json OUT [--fault NAME ...] [--rate 50] [--llm-replicas 1] [--state FOLDER] [--logs FOLDER]
    python -m benchmarks.faults --nodes 3 --rate 20 ...     a cluster: head, and one gateway and one LLM replica on each other node
    python -m benchmarks.faults --compose PROJECT --key-file FILE --rate 20 ...     a compose stack that runs already

Each row: healthy seconds, the fault, then time to recover, with recommendations through both doors at a fixed rate throughout
(three of four at high priority, one at normal, all with the client that products install, which retries), an event
every quarter of a second, and every four seconds two batches of 500 events of one user, which are repeated until acknowledged. The spike row adds twelve times the
rate at low priority. Latency counts from the intended departure, recovery from the dependency's return or from the kill.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from benchmarks.faults.batch_probe import BatchProbe
from benchmarks.faults.compose import COMPOSE_FAULTS, compose_scene
from benchmarks.faults.event_probe import EventProbe
from benchmarks.faults.kinds import FAULTS, Fault
from benchmarks.faults.nodes.kinds import NODE_FAULTS
from benchmarks.faults.nodes.kinds import PHASES as NODE_PHASES
from benchmarks.faults.nodes.layout import Layout
from benchmarks.faults.nodes.scene import ClusterProcesses, cluster_scene, layout_of
from benchmarks.faults.rows import DEADLINE_MS, PHASES, Phases, door_of, plan_row, row_of
from benchmarks.faults.scene import Scene, scene_from
from benchmarks.load.audience import RequestMix
from benchmarks.load.command import about_run, above_zero, at_least_one, run_named, write_report
from benchmarks.load.live_view import LiveView
from benchmarks.load.open_loop import RequestOutcome, run_schedule
from services.errors import EnvironmentFault, TailraceError
from services.settings.settings import load_settings

_FEWEST_NODES = 3


async def run_row(
    name: str, scene: Scene, rate_rps: float, view: LiveView, phases: Phases, fault: Fault
) -> dict[str, Any]:
    """Run one row on a healthy stack, and return its numbers."""
    planned = plan_row(rate_rps, phases, is_spike=fault.is_spike)
    crowd = RequestMix(scene.audience, len(planned))
    probe = EventProbe(scene.events, scene.audience.item_ids[0])
    batches = BatchProbe(scene.batches, scene.audience.item_ids[0], scene.num_events)
    restarts = scene.processes.num_restarts()

    async def send(number: int) -> RequestOutcome:
        caller = scene.doors[planned[number].priority][door_of(number)]
        return await caller.recommend({**crowd.ask(number), "deadline_ms": DEADLINE_MS})

    async def harm() -> float:
        """Begin and end the fault on time; return when it ended, in seconds from the row's start."""
        view.phase = "health"
        await asyncio.sleep(phases.before_s)
        view.phase = "[red]fault[/]"
        await fault.begin(scene)
        back_s = time.perf_counter() - began_s
        await asyncio.sleep(max(0.0, began_s + phases.mended_at_s - time.perf_counter()))
        if fault.end is not None:
            await fault.end(scene)
            back_s = time.perf_counter() - began_s
        view.phase = "recovery"
        return back_s

    began_s = time.perf_counter()
    probe.start(began_s)
    batches.start()
    harming = asyncio.create_task(harm())
    load = await run_schedule(send, [one.at_s for one in planned], view.ended)
    back_s = await harming
    await scene.until_healthy()
    await probe.finish()
    await batches.finish()
    now = scene.processes.num_restarts()
    restarted = {part: now[part] - count for part, count in restarts.items() if now.get(part, 0) > count}
    row = row_of(planned, load, probe, back_s, phases, scene.weights)
    row["events"]["doubled"] = await scene.num_doubled(probe.events)
    return {"fault": name, **row, "batches": batches.result(), "restarts": restarted}


async def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the rows one after another: connection faults on a stack behind proxies, the others on one without."""
    wanted = options.fault or list(FAULTS)
    rows: list[dict[str, Any]] = []
    for is_wired in (False, True):
        names = [name for name in FAULTS if name in wanted and FAULTS[name].is_wired is is_wired]
        if names:
            console.print(f"starting a separate stack{', behind proxies' if is_wired else ''} ...")
            logs = options.logs and options.logs / ("wired" if is_wired else "direct")
            given = {"llm_replicas": options.llm_replicas}
            async with scene_from(options.state.absolute(), logs, is_wired=is_wired, **given) as scene:
                rows += [await _shown_row(name, scene, options.rate, console, PHASES, FAULTS[name]) for name in names]
    return _report(rows, PHASES, options, console) | {"llm_replicas": options.llm_replicas}


async def measure_nodes(layout: Layout, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the rows of a cluster one after another."""
    wanted = options.fault or list(NODE_FAULTS)
    console.print(f"starting a cluster of {layout.num_nodes} nodes ...")
    rows: dict[str, dict[str, Any]] = {}
    ended_early, answered = None, {}
    try:
        async with cluster_scene(layout, options.state.absolute(), options.logs) as scene:
            for name in wanted:
                fault = NODE_FAULTS[name]
                phases = fault.phases or NODE_PHASES
                rows[name] = await _shown_row(name, scene, options.rate, console, phases, fault)
            if isinstance(scene.processes, ClusterProcesses):
                answered = scene.processes.answered_by_node()
    except EnvironmentFault as error:
        if not rows:
            raise
        ended_early = str(error)
    return _report(list(rows.values()), NODE_PHASES, options, console) | {
        "num_nodes": layout.num_nodes,
        "has_cpu_shares": layout.has_cpu_shares,
        "answered_by_node": answered,
        "ended_early": ended_early,
    }


async def measure_compose(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the rows of a compose stack one after another."""
    async with compose_scene(options.compose, options.key_file.read_text().strip()) as scene:
        rows = [
            await _shown_row(name, scene, options.rate, console, NODE_PHASES, COMPOSE_FAULTS[name])
            for name in options.fault or COMPOSE_FAULTS
        ]
    return _report(rows, NODE_PHASES, options, console)


def _report(
    rows: Sequence[dict[str, Any]], phases: Phases, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Show the matrix, and return what every results file has."""
    console.print(table_of(rows))
    return {
        **about_run("faults"),
        "rate_rps": options.rate,
        "deadline_ms": DEADLINE_MS,
        "phases": asdict(phases),
        "rows": rows,
    }


async def _shown_row(
    name: str, scene: Scene, rate_rps: float, console: Console, phases: Phases, fault: Fault
) -> dict[str, Any]:
    """Run one row on a stack that is healthy first, with its live view, and leave its line on the console."""
    await scene.until_healthy()
    view = LiveView(name, DEADLINE_MS)
    with Live(view, console=console, refresh_per_second=4, transient=True):
        row = await run_row(name, scene, rate_rps, view, phases, fault)
    console.print(_line(row))
    return row


def table_of(rows: Sequence[dict[str, Any]]) -> Group:
    """Return the matrix, and below it who answered, as tables that fit a terminal of 80 columns."""
    numbers = ("available\n%", "at\nonce %", "in\ntime %", "p99\nms", "goodput", "recovery\ns", "lost", "doubled")
    tiers = list(dict.fromkeys(tier for row in rows for tier in row["tiers"]))
    matrix, answered = _by_fault(numbers), _by_fault([f"{tier} %" for tier in tiers])
    for row in rows:
        matrix.add_row(
            row["fault"],
            *(f"{100 * row[share]:.2f}" for share in ("availability", "answered_at_once", "deadline_met")),
            f"{row['p99_ms']:.1f}",
            f"{row['goodput']:.3f}",
            _recovery(row),
            *(str(row["events"][what] + row["batches"][what]) for what in ("lost", "doubled")),
        )
        answered.add_row(row["fault"], *(f"{100 * row['tiers'].get(tier, 0):.0f}" for tier in tiers))
    return Group(matrix, "", answered)


def _by_fault(columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("fault", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['fault']:18}  available {100 * row['availability']:6.2f}%  in time {100 * row['deadline_met']:6.2f}%"
        f"  p99 {row['p99_ms']:.0f} ms  back {_recovery(row)} s"
    )


def _recovery(row: dict[str, Any]) -> str:
    return "-" if row["recovery_s"] is None else f"{row['recovery_s']:.1f}"


def main() -> None:
    """Measure, print the matrix, write the JSON."""
    settings = load_settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument(
        "--fault",
        nargs="+",
        action="extend",
        choices=list({**FAULTS, **NODE_FAULTS, **COMPOSE_FAULTS}),
        help="only these",
    )
    parser.add_argument("--rate", type=above_zero, default=50.0, help="requests a second")
    parser.add_argument(
        "--llm-replicas", type=at_least_one, default=1, metavar="N", help="LLM replicas of a single stack"
    )
    stack = parser.add_mutually_exclusive_group()
    stack.add_argument("--nodes", type=int, metavar="N", help="a cluster of N nodes, 3 or more, in network namespaces")
    stack.add_argument("--compose", metavar="PROJECT", help="a compose project that runs; its containers are killed")
    parser.add_argument("--key-file", type=Path, help="with --compose: a file with the operator's API key")
    parser.add_argument(
        "--state", type=Path, default=settings.state_dir, help="state folder whose bundle and store are copied"
    )
    parser.add_argument("--logs", type=Path, help="folder for the stack's logs")
    options = parser.parse_args()
    faults, stack_is = FAULTS, "without --nodes"
    if options.nodes is not None:
        faults, stack_is = NODE_FAULTS, "with --nodes"
    if options.compose is not None:
        faults, stack_is = COMPOSE_FAULTS, "with --compose"
    if unknown := [name for name in options.fault or () if name not in faults]:
        parser.error(f"argument --fault: {', '.join(unknown)}: no fault {stack_is}")
    if (options.compose is None) != (options.key_file is None):
        parser.error("arguments --compose and --key-file: give both or none")
    if options.key_file is not None and not options.key_file.is_file():
        parser.error(f"argument --key-file: there is no file {options.key_file}")
    if options.nodes is not None and options.nodes < _FEWEST_NODES:
        parser.error(f"argument --nodes: a head and two nodes with replicas are {_FEWEST_NODES} at least")
    console = Console(stderr=True)
    try:
        if options.compose is not None:
            report = asyncio.run(measure_compose(options, console))
        elif options.nodes is not None:
            with layout_of(options.nodes) as layout:
                report = asyncio.run(measure_nodes(layout, options, console))
        else:
            report = asyncio.run(measure(options, console))
    except TailraceError as error:
        sys.exit(f"error: {error}")
    except asyncio.CancelledError:
        sys.exit("stopped")
    write_report(options.json, report)
    if ended_early := report.get("ended_early"):
        sys.exit(f"error: the other rows were not run: {ended_early}")


if __name__ == "__main__":
    modules = {
        "page": "benchmarks.faults.page",
    }
    run_named(modules, main)
