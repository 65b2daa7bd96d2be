"""Recomputation of activations."""

import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.decoder.decoder import Decoder
from pipelines.training.batches import make_batch
from pipelines.training.parallel import recompute
from pipelines.training.parallel.dropout import Dropout
from pipelines.training.parallel.recompute import blocks_of, flops_factor, kept_operations, recomputed
from pipelines.training.train_decoder import TrainOptions, new_decoder, next_token_loss
from tests.support.training.bundles import build_catalogue


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation."""
        self.count += func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
        return func(*args, **(kwargs or {}))


def step_with(how: str) -> tuple[list[torch.Tensor], int, int]:
    """Return a step's gradients with dropout, the number of products, and the bytes kept of the forward pass."""
    catalogue = build_catalogue()
    decoder: Decoder = new_decoder(catalogue, TrainOptions(hidden_size=16, num_layers=3, feed_forward=32)).train()
    batch = make_batch([torch.arange(9).numpy(), torch.arange(12, 4, -1).numpy()], catalogue)
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    torch.manual_seed(1)
    with (
        Dropout([layer["output"] for layer in decoder.layers], 0.5).applied(),
        recomputed(decoder, how),
        Products() as products,
    ):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss, _ = next_token_loss(decoder, catalogue, batch, mask_seen=True)
        loss.backward()  # type: ignore[no-untyped-call]
    assert all("forward" not in vars(block) for block in blocks_of(decoder))
    return (
        [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None],
        products.count,
        sum(kept),
    )


def test_gradients_are_the_same_bits_whatever_is_computed_again() -> None:
    """Gradients are bitwise equal with dropout, fewer bytes are kept, and either all or no products are repeated."""
    (plain, usual, kept), (selective, few, kept_of_selective), (full, more, kept_of_full) = map(
        step_with, ("none", "selective", "full")
    )

    assert all(map(torch.equal, plain, selective))
    assert all(map(torch.equal, plain, full))
    assert few == usual < more
    assert kept_of_full < kept
    assert kept_of_selective < kept


def test_selective_keeps_every_attention_that_torch_may_choose() -> None:
    """All attention kernels that `scaled_dot_product_attention` may choose are kept, including cuDNN's on Hopper."""
    chosen = re.compile(
        r"aten::(_scaled_dot_product_\w*attention\w*|_(?:flash|efficient|cudnn)_attention_forward\w*)(\.(?!out)\w+)?"
    )
    of_torch = {
        name for name in torch._C._dispatch_get_all_op_names() if chosen.fullmatch(name) and "backward" not in name
    }

    kept = {operation.name() for operation in kept_operations()}

    assert of_torch - kept == {"aten::_scaled_dot_product_attention_math"}
    assert "aten::_scaled_dot_product_cudnn_attention" in kept


def test_flops_of_recomputation_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selective recomputation repeats no products, unless a torch version cannot keep an operation."""
    cpu, dtype = torch.device("cpu"), torch.float32
    as_it_is = flops_factor("selective", cpu, dtype)
    monkeypatch.setattr(recompute, "_KEPT", ("mm", "_scaled_dot_product_flash_attention_for_cpu"))

    assert (flops_factor("none", cpu, dtype), as_it_is, flops_factor("full", cpu, dtype)) == (1.0, 1.0, 4 / 3)
    assert 1.0 < flops_factor("selective", cpu, dtype) < 4 / 3


def test_a_model_without_lists_of_modules_has_no_blocks() -> None:
    """A model without module lists is not recomputed."""
    assert blocks_of(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("how", ["selective", "full"])
def test_an_error_inside_leaves_the_model_as_it_was(how: str) -> None:
    """After an error, the blocks have their original forward passes."""
    decoder = new_decoder(build_catalogue(), TrainOptions(hidden_size=16))

    with pytest.raises(ValueError, match="stop"), recomputed(decoder, how):
        raise ValueError("stop")

    assert all("forward" not in vars(block) for block in blocks_of(decoder))
