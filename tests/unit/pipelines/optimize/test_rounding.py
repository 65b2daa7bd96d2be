"""Training with the engine's number formats: computed values, gradients, and equality with the served weights."""

import pytest
import torch

from models.decoder.decoder import Decoder
from pipelines.optimize.rounding import as_served, engine_numbers
from pipelines.scoring.dense import hidden_states
from services.llm.engine.config import WeightKind
from services.llm.engine.cpu.quantise import dequantised, quantise, rounded
from tests.support.engine.attention_shapes import attention_shape

SIZES = {"vocab_size": 30, "hidden_size": 40, "intermediate_size": 50, "max_position_embeddings": 64}


@pytest.fixture
def decoder() -> Decoder:
    """A small decoder of odd sizes."""
    torch.manual_seed(0)
    return Decoder(attention_shape(2, 2, 20, **SIZES)).eval()


@pytest.mark.parametrize(("kind", "matrix_bits", "table_bits"), [("int4", 4, 8), ("int8", 8, None)])
def test_weights_are_the_engine_s_inside_and_their_own_outside(
    decoder: Decoder, kind: WeightKind, matrix_bits: int, table_bits: int | None
) -> None:
    """Inside the block, matrices equal the engine's rounded weights; afterwards they are restored in bf16 precision."""
    before = {name: value.clone().bfloat16().float() for name, value in decoder.state_dict().items()}

    with engine_numbers(decoder, kind):
        served = as_served(decoder).state_dict()

    for name, value in served.items():
        bits = table_bits if name.startswith("embedding") else matrix_bits
        is_matrix = value.dim() == 2 and bits is not None
        assert torch.equal(value, rounded(before[name], bits) if is_matrix else decoder.state_dict()[name])
    assert decoder.state_dict().keys() == before.keys()
    for name in (name for name, value in before.items() if value.dim() == 2 and not name.startswith("embedding")):
        assert torch.equal(decoder.state_dict()[name], before[name])


def test_an_engine_in_bf16_has_the_same_codes_as_one_in_fp32(decoder: Decoder) -> None:
    """Afterwards both dtypes quantise to the same numbers, since the weights are representable in bf16."""
    with engine_numbers(decoder, "int4"):
        trained = as_served(decoder).state_dict()

    for name, weight in decoder.state_dict().items():
        if weight.dim() == 2:
            bits = 8 if name.startswith("embedding") else 4
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(dequantised(quantise(weight.to(dtype), bits), weight.shape[1]), trained[name])


def test_gradients_pass_the_rounding(decoder: Decoder) -> None:
    """Every weight gets a gradient, and training lowers the loss of the rounded decoder."""
    tokens = torch.randint(0, 30, (4, 9))
    wanted = torch.randn(36, 40)

    def loss() -> torch.Tensor:
        return (hidden_states(decoder, tokens) - wanted).pow(2).mean()

    with engine_numbers(decoder, "int4"):
        optimizer, losses = torch.optim.Adam(decoder.parameters(), lr=3e-3), []
        for _ in range(20):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            assert all(parameter.grad is not None for parameter in decoder.parameters())
            optimizer.step()
            losses.append(float(value.detach()))

    assert losses[-1] < 0.9 * losses[0]
