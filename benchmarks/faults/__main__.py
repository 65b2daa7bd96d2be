"""The fault matrix: effects on callers while one part after another fails, on a separate stack with faulty connections.

    python -m benchmarks.faults --json OUT [--fault NAME ...] [--rate 50] [--state FOLDER] [--logs FOLDER]
    python -m benchmarks.faults --nodes 3 --rate 20 ...     a cluster: a head, and gateway and LLM on the other nodes

Each row: healthy seconds, the fault, then time to recover, with recommendations through both doors at a fixed rate
throughout (three of four at high priority, one at normal, all with the retrying client that products install), an event
every quarter of a second, and every four seconds two batches of 500 events of one user, repeated until acknowledged.
The spike row adds twelve times the rate at low priority. Latency counts from the intended departure, recovery from the
dependency's return or the kill.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.faults.batch_probe import BatchProbe
from benchmarks.faults.event_probe import EventProbe
from benchmarks.faults.kinds import FAULTS, NODE_FAULTS, Fault
from benchmarks.faults.nodes.layout import Layout
from benchmarks.faults.nodes.scene import ClusterProcesses, cluster_scene, layout_of
from benchmarks.faults.peer import TextProbe
from benchmarks.faults.rows import DEADLINE_MS, NODE_PHASES, PHASES, Phases, door_of, num_showing, plan_row, row_of
from benchmarks.faults.scene import Scene, SceneKind, scene_from
from benchmarks.load.clients import RestClient
from benchmarks.load.command import about_run, above_zero, exit_on_errors, report_parser, write_report
from benchmarks.load.open_loop import RequestOutcome, run_schedule
from services.errors import EnvironmentFault
from services.settings.settings import load_settings

_FEWEST_NODES = 3
_TEXT_ASK = {"user_id": "nobody", "k": 5}


async def run_row(name: str, scene: Scene, rate_rps: float, phases: Phases, fault: Fault) -> dict[str, Any]:
    """Run one row on a healthy stack, and return its numbers."""
    planned = plan_row(rate_rps, phases, is_spike=fault.is_spike)
    probe = EventProbe(scene.events, scene.audience.item_ids[0])
    batches = BatchProbe(scene.batches, scene.audience.item_ids[0], scene.num_events)
    restarts = scene.processes.num_restarts()
    hidden = await scene.hide(fault.num_hidden)

    async def send(number: int) -> RequestOutcome:
        caller = scene.doors[planned[number].priority][door_of(number)]
        return await caller.recommend({**scene.audience.mixed(number), "deadline_ms": DEADLINE_MS})

    async def harm() -> float:
        """Begin and end the fault on time; return its end, in seconds from the row's start."""
        await asyncio.sleep(phases.before_s)
        await fault.begin(scene)
        back_s = time.perf_counter() - began_s
        await asyncio.sleep(max(0.0, began_s + phases.mended_at_s - time.perf_counter()))
        if fault.end is not None:
            await fault.end(scene)
            back_s = time.perf_counter() - began_s
        return back_s

    began_s = time.perf_counter()
    probe.start(began_s)
    batches.start()
    harming = asyncio.create_task(harm())
    text = TextProbe(RestClient(scene.settings.http_host, scene.settings.http_port, scene.operator_key), _TEXT_ASK)
    asking = asyncio.create_task(text.run(began_s)) if scene.peers else None
    load = await run_schedule(send, [request.at_s for request in planned])
    back_s = await harming
    await scene.until_healthy()
    await probe.finish()
    await batches.finish()
    if asking is not None:
        asking.cancel()
    now = scene.processes.num_restarts()
    restarted = {part: now[part] - count for part, count in restarts.items() if now.get(part, 0) > count}
    row = row_of(planned, load, probe, back_s, phases, scene.weights)
    row["events"]["doubled"] = await scene.num_doubled(probe.events)
    row["hidden"] = {"items": len(hidden), "shown": num_showing(load.shots, hidden)}
    if scene.peers:
        row["text"] = text.result(back_s)
    if scene.writers:
        row["num_escaped"] = await asyncio.to_thread(scene.writers[-1].num_escaped)
    return {"fault": name, **row, "batches": batches.result(), "restarts": restarted}


async def run_rows(
    scene: Scene, faults: Mapping[str, Fault], phases: Phases, rate_rps: float, rows: list[dict[str, Any]]
) -> None:
    """Add the rows of these faults, each measured on an initially healthy stack, and print a line about each."""
    for name, fault in faults.items():
        await scene.until_healthy()
        row = await run_row(name, scene, rate_rps, fault.phases or phases, fault)
        recovered = "-" if row["recovery_s"] is None else f"{row['recovery_s']:.1f}"
        _note(
            f"{name:18}  available {100 * row['availability']:6.2f}%  in time {100 * row['deadline_met']:6.2f}%"
            f"  p99 {row['p99_ms']:.0f} ms  back {recovered} s"
        )
        rows.append(row)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rows of one machine: connection faults on a stack behind proxies, all other faults without proxies."""
    rows: list[dict[str, Any]] = []
    for kind in SceneKind:
        faults = {name: FAULTS[name] for name in options.fault if FAULTS[name].scene is kind}
        if faults:
            _note(f"starting a separate stack, {kind} ...")
            logs = options.logs and options.logs / kind
            async with scene_from(options.state.absolute(), logs, kind) as scene:
                await run_rows(scene, faults, PHASES, options.rate, rows)
    return _report(rows, options, PHASES)


async def measure_nodes(layout: Layout, options: argparse.Namespace) -> dict[str, Any]:
    """Run the rows of a cluster."""
    _note(f"starting a cluster of {layout.num_nodes} nodes ...")
    rows: list[dict[str, Any]] = []
    ended_early, answered = None, {}
    try:
        async with cluster_scene(layout, options.state.absolute(), options.logs) as scene:
            await run_rows(scene, {name: NODE_FAULTS[name] for name in options.fault}, NODE_PHASES, options.rate, rows)
            if isinstance(scene.processes, ClusterProcesses):
                answered = scene.processes.answered_by_node()
    except EnvironmentFault as error:
        if not rows:
            raise
        ended_early = str(error)
    about = {"num_nodes": layout.num_nodes, "answered_by_node": answered, "ended_early": ended_early}
    return _report(rows, options, NODE_PHASES) | about


def _report(rows: Sequence[dict[str, Any]], options: argparse.Namespace, phases: Phases) -> dict[str, Any]:
    """Print the totals, and return the common header of results files."""
    for what in ("lost", "doubled"):
        print(f"{what}: {sum(row[sent][what] for row in rows for sent in ('events', 'batches'))}")
    print(f"answers with a hidden item: {sum(row['hidden']['shown'] for row in rows)}")
    about = {"rate_rps": options.rate, "deadline_ms": DEADLINE_MS, "phases": asdict(phases)}
    return about_run("faults") | about | {"rows": rows}


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, write the JSON."""
    options = _options()
    with exit_on_errors():
        if options.nodes is not None:
            with layout_of(options.nodes) as layout:
                report = asyncio.run(measure_nodes(layout, options))
        else:
            report = asyncio.run(measure(options))
    write_report(options.json, report)
    if ended_early := report.get("ended_early"):
        sys.exit(f"error: the other rows were not run: {ended_early}")


def _options() -> argparse.Namespace:
    parser = report_parser(__doc__)
    parser.add_argument("--fault", nargs="+", action="extend", choices=list(FAULTS | NODE_FAULTS), help="only these")
    parser.add_argument("--rate", type=above_zero, default=50.0, help="requests a second")
    parser.add_argument("--nodes", type=int, metavar="N", help="a cluster of N nodes, 3 or more, in network namespaces")
    state_dir = load_settings().state_dir
    parser.add_argument("--state", type=Path, default=state_dir, help="state folder whose bundle and store are copied")
    parser.add_argument("--logs", type=Path, help="folder for the stack's logs")
    options = parser.parse_args()
    faults, stack_is = (FAULTS, "without --nodes") if options.nodes is None else (NODE_FAULTS, "with --nodes")
    if unknown := [name for name in options.fault or () if name not in faults]:
        parser.error(f"argument --fault: {', '.join(unknown)}: no fault {stack_is}")
    options.fault = options.fault or list(faults)
    if options.nodes is not None and options.nodes < _FEWEST_NODES:
        parser.error(f"argument --nodes: a head and two nodes with replicas are {_FEWEST_NODES} at least")
    return options


if __name__ == "__main__":
    main()
