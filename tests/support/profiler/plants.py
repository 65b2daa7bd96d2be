"""Traces with a known bottleneck, recorded by plain torch, which the profiler must name.

    python -m tests.support.profiler.plants KIND VARIANT FOLDER [--styles plain shapes stack steps] [--size 1.0]
    [--list]

Each variant is a small user-style program whose kind is known by construction: large products, large elementwise
operations, collectives between two processes, thousands of tiny operations, a loader that sleeps, and steps without a
dominant kind. It knows nothing of the profiler under test. `--size` scales the amount of work. It writes
FOLDER/STYLE.json, and for communication also the second rank's STYLE.1.json.
"""

import argparse
import os
import sys
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
from torch.utils.data import DataLoader, Dataset

Step = Callable[[], None]
PLANTS: dict[str, dict[str, Callable[[float], Step]]] = {}
STYLES = ("plain", "shapes", "stack", "steps")
NUM_STEPS = 4


def plant(kind: str):
    """Register a builder of a step of this kind, under its function's name."""

    def register(make):
        PLANTS.setdefault(kind, {})[make.__name__] = make
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
    """A loss."""
    return rows.pow(2).mean()


@plant("compute")
def square_products(size: float) -> Step:
    """Products of square matrices."""
    side = int(1024 * size)
    left, right = torch.randn(side, side), torch.randn(side, side)
    out = torch.empty(side, side)
    return repeated(3, lambda: torch.mm(left, right, out=out))


@plant("compute")
def wide_layers(size: float) -> Step:
    """A training step of wide layers on a large batch, without an optimizer's work."""
    width = int(1024 * size)
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    rows = torch.randn(1024, width)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        net(rows).sum().backward()

    return step


@plant("compute")
def batched_products(size: float) -> Step:
    """Batched products under a range of the user's."""
    side = int(384 * size)
    left, right = torch.randn(16, side, side), torch.randn(16, side, side)

    def step() -> None:
        with record_function("scores"):
            left @ right

    return step


@plant("compute")
def convolutions(size: float) -> Step:
    """A forward pass of convolutions with many channels."""
    net = nn.Sequential(*(nn.Conv2d(128, 128, 3, padding=1) for _ in range(3)))
    images = torch.randn(max(1, int(4 * size)), 128, 48, 48)

    def step() -> None:
        with torch.no_grad():
            net(images)

    return step


@plant("memory")
def long_chain(size: float) -> Step:
    """Elementwise operations over tensors larger than any cache."""
    a, b = (torch.randn(int(8_000_000 * size)) for _ in range(2))
    return repeated(1, lambda: a.mul_(1.0001).add_(b).sub_(b).abs_())


@plant("memory")
def allocating(size: float) -> Step:
    """The same with results in fresh memory, and a sum."""
    a, b = (torch.randn(int(4_000_000 * size)) for _ in range(2))

    def step() -> None:
        with record_function("elementwise"):
            (a * b + a - b).sum()

    return step


@plant("memory")
def norms_and_copies(size: float) -> Step:
    """Softmax, layer norm and copies of a large matrix."""
    rows = torch.randn(int(4096 * size), 1024)
    norm = nn.LayerNorm(1024)

    def step() -> None:
        with torch.no_grad():
            torch.cat([norm(rows), rows.softmax(1)]).clone()

    return step


@plant("memory")
def matrix_vector(size: float) -> Step:
    """Products of a large matrix and a vector: two FLOPs per number read."""
    matrix, vector = torch.randn(int(6000 * size), 4096), torch.randn(4096)
    return repeated(4, lambda: torch.mv(matrix, vector))


@plant("launch")
def tiny_sums(size: float) -> Step:
    """Thousands of sums of a few numbers."""
    one, other = torch.randn(int(16 * size)), torch.randn(int(16 * size))

    def step() -> None:
        total = one
        for _ in range(1500):
            total = total + other

    return step


@plant("launch")
def tiny_net(size: float) -> Step:
    """Training of a tiny net on a tiny batch, with an optimizer that loops over the parameters."""
    width = int(8 * size)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(12)))
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    return repeated(4, trained(net, repeat(torch.randn(4, width)), optimizer))


@plant("launch")
def small_products(size: float) -> Step:
    """A recurrence of products of small matrices."""
    side = int(24 * size)
    state, weight = torch.randn(side, side), torch.randn(side, side) / side

    def step() -> None:
        now = state
        for _ in range(800):
            now = torch.tanh(now @ weight)

    return step


class Sleepy(Dataset):
    """Rows that take a while."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, place: int) -> torch.Tensor:
        time.sleep(self._wait_s)
        return torch.randn(256)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256))


@plant("data wait")
def slow_loader(size: float) -> Step:
    """A DataLoader in the same process whose rows take a millisecond each."""
    return trained(_net(), iter(DataLoader(Sleepy(0.001 * size), batch_size=32)))


@plant("data wait")
def slow_workers(size: float) -> Step:
    """A DataLoader whose two workers do not keep up."""
    return trained(_net(), iter(DataLoader(Sleepy(0.002 * size), batch_size=32, num_workers=2)))


@plant("data wait")
def slow_generator(size: float) -> Step:
    """A generator that sleeps, without any range."""

    def rows() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.02 * size)
            yield torch.randn(64, 256)

    return trained(_net(), rows())


@plant("data wait")
def slow_read(size: float) -> Step:
    """A read under the user's own range."""
    net = _net()

    def step() -> None:
        with record_function("load_batch"):
            time.sleep(0.015 * size)
            rows = torch.randn(64, 256)
        with record_function("train"):
            net(rows).sum().backward()

    return step


@plant("communication")
def large_sums(size: float) -> Step:
    """Sums over the ranks that nothing overlaps, after a small product."""
    grads = torch.randn(int(4_000_000 * size))
    rows = torch.randn(256, 256)

    def step() -> None:
        rows @ rows
        dist.all_reduce(grads)

    return step


@plant("communication")
def data_parallel(size: float) -> Step:
    """DistributedDataParallel of a wide net on a small batch."""
    width = int(1024 * size)
    net = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    )
    return trained(net, repeat(torch.randn(8, width)))


@plant("communication")
def gathers(size: float) -> Step:
    """Gathers that are started and awaited."""
    mine = torch.randn(int(2_000_000 * size))
    all_of_them = [torch.empty_like(mine) for _ in range(2)]

    def step() -> None:
        work = dist.all_gather(all_of_them, mine, async_op=True)
        work.wait()
        all_of_them[0][:1000].sum()

    return step


@plant("none")
def transformer(size: float) -> Step:
    """Training of a transformer's layer with AdamW."""
    width = int(256 * size) // 8 * 8
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.1)
    optimizer = torch.optim.AdamW(layer.parameters())
    return trained(layer, repeat(torch.randn(16, 64, width)), optimizer, mean_of_squares)


@plant("none")
def balanced(size: float) -> Step:
    """Products and elementwise operations of about equal time."""
    side = int(768 * size)
    left, right = torch.randn(side, side), torch.randn(side, side)
    long = torch.randn(int(3_000_000 * size**3))  # scales the product's work

    def step() -> None:
        product = left @ right
        torch.relu(product).sum()
        long.mul(1.01).add_(long)

    return step


@plant("none")
def deep_net(size: float) -> Step:
    """Training of a net with norms and activations, from a loader that keeps up."""
    width = int(512 * size)
    blocks = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    net = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(net.parameters())
    batches = iter(DataLoader(torch.randn(40 * 512, width), batch_size=512))
    return trained(net, batches, optimizer, mean_of_squares)


@plant("none")
def images(size: float) -> Step:
    """Training of a small net of convolutions with batch norm and pooling."""
    channels = int(16 * size)
    net = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.BatchNorm2d(2 * channels), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return trained(net, repeat(torch.randn(16, 3, 64, 64)), optimizer)


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
    """Record a step in these styles."""
    for style in styles:
        record(step, folder / f"{style}.{rank}.json" if rank else folder / f"{style}.json", style)


def _rank(rank: int, options: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    step = PLANTS[options.kind][options.variant](options.size)
    dist.barrier()
    record_all(step, options.folder, options.styles, rank)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Record the variant that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=PLANTS, nargs="?")
    parser.add_argument("variant", nargs="?")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--styles", choices=STYLES, nargs="+", default=["plain"])
    parser.add_argument("--size", type=float, default=1.0)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    if options.list:
        sys.stdout.writelines(f"{kind}\t{variant}\n" for kind, variants in PLANTS.items() for variant in variants)
        return
    if options.kind == "communication":
        meeting = (options.folder / f"meeting{os.getpid()}").absolute()
        mp.spawn(_rank, (options, str(meeting)), nprocs=2)
        meeting.unlink(missing_ok=True)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    record_all(PLANTS[options.kind][options.variant](options.size), options.folder, options.styles)


if __name__ == "__main__":
    main()
