"""Dropout that exists only during training; served models have none."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from pipelines.training.fit.parallel import ALONE, Group


@contextmanager
def dropout_after(modules: Iterable[nn.Module], probability: float, group: Group = ALONE) -> Iterator[None]:
    """Apply dropout to these modules' outputs inside this block while they are in training mode."""

    def drop(place: int, module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return group.dropped(output, probability, place) if module.training else output

    dropping = list(modules)
    group.drops(dropping, probability)
    handles = [module.register_forward_hook(partial(drop, place)) for place, module in enumerate(dropping)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
