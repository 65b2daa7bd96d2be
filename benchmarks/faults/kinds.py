"""The faults of one machine and of a cluster, by name, and how each begins and ends on a scene."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.faults.object_store import write_hostile
from benchmarks.faults.rows import Phases
from benchmarks.faults.scene import Scene, SceneKind
from benchmarks.faults.store import fail_over, follow, rotate_password
from benchmarks.faults.tcp_proxy import Wire


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. With `end` None the part recovers by itself, and recovery counts from the end of `begin`.

    `phases` None: the run's phases. `num_hidden`: items hidden before the row; their positions in answers are counted.
    """

    begin: Callable[[Scene], Awaitable[None]]
    end: Callable[[Scene], Awaitable[None]] | None = None
    scene: SceneKind = SceneKind.DIRECT
    is_spike: bool = False
    phases: Phases | None = None
    num_hidden: int = 0


def _wire(part: str, wire: Wire, kind: SceneKind = SceneKind.WIRED) -> Fault:
    return Fault(lambda scene: scene.wires[part].become(wire), lambda scene: scene.wires[part].become(Wire.PASS), kind)


def _peer(begin: str, end: str) -> Fault:
    """Return a fault of the server that ranks and writes for the stack, from methods of its process."""

    def step(method: str) -> Callable[[Scene], Awaitable[None]]:
        return lambda scene: asyncio.to_thread(getattr(scene.peers[0], method))

    return Fault(step(begin), step(end), SceneKind.HANDED)


def _kill(name: str) -> Fault:
    return Fault(lambda scene: asyncio.to_thread(scene.processes.kill, name))


def _step(method: str) -> Callable[[Scene], Awaitable[None]]:
    """Return a step that calls this method of the scene's processes."""
    return lambda scene: asyncio.to_thread(getattr(scene.processes, method))


async def _lose_states(scene: Scene) -> None:
    """Make a starting gateway lack the items topic and its snapshot, and kill the gateway that has their states."""
    await scene.wires["broker"].become(Wire.STOP)
    scene.settings.items_snapshot.unlink(missing_ok=True)
    await asyncio.to_thread(scene.processes.kill, "gateway")


async def _write_hostile(scene: Scene) -> None:
    """Let a hostile writer into the object store, and restart a gateway while it is in that state."""
    scene.writers.append(await write_hostile(scene.settings))
    await asyncio.sleep(2 * scene.settings.bundle_poll_s)
    await asyncio.to_thread(scene.processes.kill, "gateway")


async def _mend_record(scene: Scene) -> None:
    await asyncio.to_thread(scene.writers[-1].mend)


async def _nothing(_: Scene) -> None:
    """Without a fault: health, and the spike, which is load."""


_NEW_GROUP = Phases(before_s=8.0, during_s=14.0, after_s=60.0)
"""Time to notice that a rank hangs, and to start a replica with its ranks."""

FAULTS = {
    "none": Fault(_nothing, _nothing),
    **{
        f"{part}-{wire}": _wire(part, wire)
        for part in ("store", "broker")
        for wire in (Wire.STOP, Wire.HANG, Wire.SLOW, Wire.RESET)
    },
    "store-password-rotated": Fault(rotate_password, scene=SceneKind.WIRED),
    "store-failed-over": Fault(fail_over, follow, SceneKind.WIRED),
    **{f"{name}-killed": _kill(name) for name in ("store", "gateway", "llm", "worker", "edge", "ingress", "raylet")},
    "llm-hung": Fault(_step("freeze_llm"), _step("thaw_llm")),
    "llm-stalls": Fault(_step("stall_llm")),
    "gateway-without-states": Fault(
        _lose_states, lambda scene: scene.wires["broker"].become(Wire.PASS), SceneKind.WIRED, num_hidden=3
    ),
    "object-store-hostile": Fault(_write_hostile, _mend_record, SceneKind.STORED),
    "rank-killed": Fault(_step("kill_rank"), scene=SceneKind.SHARDED, phases=_NEW_GROUP),
    "rank-hung": Fault(_step("freeze_rank"), scene=SceneKind.SHARDED, phases=_NEW_GROUP),
    "peer-killed": _peer("kill", "start"),
    "peer-hung": _peer("freeze", "thaw"),
    "peer-slow": _wire("peer", Wire.SLOW, SceneKind.HANDED),
    "low-priority-spike": Fault(_nothing, _nothing, is_spike=True),
}

_REPLACEMENT = Phases(before_s=8.0, during_s=240.0, after_s=12.0)
"""Upper limit for replacing all nodes, one after another."""
NODE_FAULTS = {
    "none": Fault(_nothing, _nothing),
    **{f"{name}-killed": _kill(name) for name in ("gateway", "llm", "worker", "edge", "standby", "ingress", "raylet")},
    **{f"{name}-killed": _kill(name) for name in ("store", "head", "first-node", "last-node")},
    "first-node-cut": Fault(_step("cut_first_node"), _step("mend_first_node")),
    "all-replaced": Fault(_step("replace_all"), phases=_REPLACEMENT),
}
