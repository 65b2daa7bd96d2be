"""Builds an epoch's batches ahead of their steps, in a thread if the steps run on a GPU.

Building a batch draws nothing, so batches, their order and the state of every generator do not depend on prefetching.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from pipelines.training.batches import Batch, MakeBatch

_NUM_AHEAD = 2


def is_worth_it(device: torch.device) -> bool:
    """Whether batches for this device are prefetched; on the CPU a thread would compete with the step."""
    return device.type != "cpu"


@contextmanager
def ready_batches(makes: Sequence[MakeBatch], device: torch.device) -> Iterator[Iterator[Batch]]:
    """Iterate over the batches on the device, in order, inside this block.

    Building errors are raised by the iterator.

    The thread builds at most two batches ahead and has ended when the block ends.
    """
    if not is_worth_it(device):
        yield (_ready(make, device) for make in makes)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        yield _made_ahead(makes, device, thread)


def _made_ahead(makes: Sequence[MakeBatch], device: torch.device, thread: ThreadPoolExecutor) -> Iterator[Batch]:
    waiting: deque[Future[Batch]] = deque()
    for make in makes:
        waiting.append(thread.submit(_ready, make, device))
        if len(waiting) > _NUM_AHEAD:
            yield waiting.popleft().result()
    for batch in waiting:
        yield batch.result()


def _ready(make: MakeBatch, device: torch.device) -> Batch:
    return make().to(device)
