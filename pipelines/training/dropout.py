"""Dropout around a model that knows nothing of it, because serving must not."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional


@contextmanager
def dropout_after(modules: Iterable[nn.Module], probability: float) -> Iterator[None]:
    """Inside this block, drop values from these modules' outputs while they are in training mode."""

    def drop(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return functional.dropout(output, probability, training=module.training)

    handles = [module.register_forward_hook(drop) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
