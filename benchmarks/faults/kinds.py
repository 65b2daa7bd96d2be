"""The faults by name, and how each begins and ends on a scene."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.faults.scene import Scene
from benchmarks.faults.tcp_proxy import Wire


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `end` None: the part comes back by itself, and recovery counts from `begin`."""

    begin: Callable[[Scene], Awaitable[None]]
    end: Callable[[Scene], Awaitable[None]] | None = None
    is_wired: bool = False
    is_spike: bool = False


def _wire(part: str, wire: Wire) -> Fault:
    return Fault(
        lambda scene: scene.wires[part].become(wire), lambda scene: scene.wires[part].become(Wire.PASS), is_wired=True
    )


def _kill(name: str) -> Fault:
    return Fault(lambda scene: asyncio.to_thread(getattr(scene.processes, f"kill_{name}")))


async def _nothing(_: Scene) -> None:
    """No fault: health, and the spike, which is load."""


FAULTS = {
    "none": Fault(_nothing, _nothing),
    **{
        f"{part}-{wire}": _wire(part, wire)
        for part in ("store", "broker")
        for wire in (Wire.STOP, Wire.HANG, Wire.SLOW, Wire.RESET)
    },
    **{f"{name}-killed": _kill(name) for name in ("store", "gateway", "llm", "worker", "edge", "ingress", "raylet")},
    "low-priority-spike": Fault(_nothing, _nothing, is_spike=True),
}
