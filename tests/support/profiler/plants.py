"""Traces with a known bottleneck, recorded by plain torch, which the profiler must name.

    python -m tests.support.profiler.plants KIND FOLDER [--styles plain shapes stack steps]

Each kind is a small user-style program whose bottleneck is known by construction: large products, large elementwise
operations, collectives between two processes, thousands of tiny operations, a generator that sleeps, and steps without
a dominant kind. It does not import the profiler under test. It writes FOLDER/STYLE.json, and for communication also
the second rank's STYLE.1.json.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

Step = Callable[[], None]
PLANTS: dict[str, Callable[[], Step]] = {}
STYLES = ("plain", "shapes", "stack", "steps")
NUM_STEPS = 4


def plant(kind: str):
    """Register a builder of a step of this kind."""

    def register(make):
        PLANTS[kind] = make
        return make

    return register


def repeated(times: int, act: Callable[[], object]) -> Step:
    """Repeat an operation within a step."""

    def step() -> None:
        for _ in range(times):
            act()

    return step


def trained(
    net: nn.Module,
    batches: Iterator[torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum,
) -> Step:
    """Forward and backward on the next batch, and the optimizer's step if there is an optimizer."""

    def step() -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        loss(net(next(batches))).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def mean_of_squares(rows: torch.Tensor) -> torch.Tensor:
    return rows.pow(2).mean()


@plant("compute")
def wide_layers() -> Step:
    """A training step of wide layers on a large batch, without activations, biases and an optimizer's work.

    Other work than the products stays far below a tenth of the time, also on a busy machine.
    """
    width = 1024
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
    rows = torch.randn(1024, width)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        net(rows).sum().backward()

    return step


@plant("memory")
def elementwise() -> Step:
    """Elementwise operations and a sum of large arrays.

    They write to memory they already hold: returning 64 MB to the system between two operations is a gap in the trace.
    """
    a, b, out = (torch.randn(16_000_000) for _ in range(3))

    def step() -> None:
        with record_function("elementwise"):
            torch.mul(a, b, out=out).add_(a).sub_(b).sum()

    return step


@plant("launch")
def tiny_net() -> Step:
    """Training of a tiny net on a tiny batch, with an optimizer that loops over the parameters."""
    width = 8
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(12)))
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    return repeated(4, trained(net, repeat(torch.randn(4, width)), optimizer))


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))


@plant("data wait")
def slow_generator() -> Step:
    """A generator that sleeps, without any range."""

    def rows() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.02)
            yield torch.randn(64, 256)

    return trained(_net(), rows())


@plant("communication")
def data_parallel() -> Step:
    """DistributedDataParallel of a wide layer on one row: no gradient is ready before the step ends."""
    width = 2048
    net = nn.parallel.DistributedDataParallel(nn.Linear(width, width, bias=False))
    return trained(net, repeat(torch.randn(1, width)))


@plant("none")
def transformer() -> Step:
    """Training of a transformer's layer with AdamW."""
    width = 256
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.1)
    optimizer = torch.optim.AdamW(layer.parameters())
    return trained(layer, repeat(torch.randn(16, 64, width)), optimizer, mean_of_squares)


def record(step: Step, out: Path, style: str) -> None:
    """Run a step twice, then record it in one of the usual ways."""
    step()
    step()
    if style == "steps":
        with profile(
            activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=NUM_STEPS)
        ) as recorded:
            for _ in range(NUM_STEPS + 2):
                step()
                recorded.step()
    else:
        options = {"record_shapes": style == "shapes", "with_stack": style == "stack"}
        with profile(activities=[ProfilerActivity.CPU], **options) as recorded:
            for number in range(NUM_STEPS):
                with record_function(f"step {number}") if style == "shapes" else nullcontext():
                    step()
    recorded.export_chrome_trace(str(out))


def record_all(step: Step, folder: Path, styles: list[str], rank: int = 0) -> None:
    for style in styles:
        record(step, folder / f"{style}.{rank}.json" if rank else folder / f"{style}.json", style)


def _rank(rank: int, options: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    step = PLANTS[options.kind]()
    dist.barrier()
    record_all(step, options.folder, options.styles, rank)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Record the plant that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=PLANTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--styles", choices=STYLES, nargs="+", default=["plain"])
    options = parser.parse_args(arguments)
    if options.kind == "communication":
        meeting = (options.folder / f"meeting{os.getpid()}").absolute()
        mp.spawn(_rank, (options, str(meeting)), nprocs=2)
        meeting.unlink(missing_ok=True)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record_all(PLANTS[options.kind](), options.folder, options.styles)


if __name__ == "__main__":
    main()
