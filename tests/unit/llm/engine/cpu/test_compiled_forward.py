"""The compiled forward pass against the layer loop on plain torch: same steps, hidden states, keys and values."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.decoder.decoder import Decoder
from services.llm.engine.config import EngineConfig
from services.llm.engine.cpu.compiler import BuildFailedError, built_library
from services.llm.engine.cpu.forward import CpuForward
from services.llm.engine.cpu.library import Library
from services.llm.engine.forward.layers import LayerLoop
from services.llm.engine.forward.ops import TorchOps
from services.llm.engine.forward.torch_attention import TorchAttention
from services.llm.engine.forward.weights import join_weights
from services.llm.engine.plan import Chunk, StepPlan
from tests.support.engine.steps import BLOCK, CPU, NUM_BLOCKS, ODD, VOCABULARY, decoders, plans, prompt_of, run_step
from tests.support.training.sequences import sequence_of

pytestmark = pytest.mark.native

SHAPES = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def library() -> Library:
    """The library for this processor; skipped without a compiler."""
    try:
        return Library(built_library(EngineConfig().kernel_cache))
    except BuildFailedError as why:
        pytest.skip(str(why))


@st.composite
def decodes(draw) -> StepPlan:
    """Build a step of many short chunks with contexts of any length and shared context blocks."""
    blocks = np.random.default_rng(draw(st.integers(0, 99))).permutation(NUM_BLOCKS).tolist()
    plan = StepPlan()
    for order in range(draw(st.integers(1, 12))):
        num_shared, offset = draw(st.integers(0, NUM_BLOCKS - 12)), draw(st.integers(0, BLOCK - 1))
        start, count = num_shared * BLOCK + offset, draw(st.integers(1, BLOCK - offset))
        tokens = [position % VOCABULARY for position in range(start + count)]
        sequence = sequence_of(tokens, [*blocks[12 : 12 + num_shared], blocks[order]])
        plan.chunks.append(Chunk(sequence, start, count))
    return plan


STEPS = pytest.mark.parametrize("steps", [plans(), decodes()], ids=["any", "many-decodes"])


def both(library: Library, decoder: Decoder, plan: StepPlan, dtype: torch.dtype, weight_kind: str = "model"):
    """Run a step compiled and in torch; return pairs of results: hidden states, cache, tails."""
    weights = join_weights(decoder.to(dtype))
    attention = TorchAttention(8, 16, BLOCK, CPU, weights.config.window)
    compiled = run_step(lambda cache: CpuForward(library, weights, cache, weight_kind), weights, plan)
    plain = run_step(lambda cache: LayerLoop(weights, cache, TorchOps(), attention), weights, plan)
    return zip(compiled, plain, strict=True)


@STEPS
@SHAPES
@given(decoders(), st.data())
def test_fp32_equals_torch_to_rounding(library, steps, decoder, data) -> None:
    """For any family, shape and step, hidden states, keys and values equal torch's to fp32's precision."""
    for compiled, plain in both(library, decoder, data.draw(steps), torch.float32):
        torch.testing.assert_close(compiled, plain, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("weight_kind", ["model", "int8"])
@STEPS
@SHAPES
@given(decoders(), st.data())
def test_rows_that_are_not_read_change_nothing(library, weight_kind, steps, decoder, data) -> None:
    """Any output rows, none included, have the hidden states of a step that returns all; so have keys and values."""
    plan = data.draw(steps)
    is_read = st.lists(st.booleans(), min_size=plan.size.num_rows, max_size=plan.size.num_rows)
    rows_R = torch.tensor(data.draw(is_read)).nonzero().flatten()
    weights = join_weights(decoder)
    attention = TorchAttention(8, 16, BLOCK, CPU, weights.config.window)
    builds = (
        lambda cache: CpuForward(library, weights, cache, weight_kind),
        lambda cache: LayerLoop(weights, cache, TorchOps(), attention),
    )
    for build in builds:
        hidden_TD, *stored = run_step(build, weights, plan)
        hidden_RD, *stored_too = run_step(build, weights, plan, rows_R)

        torch.testing.assert_close(hidden_RD, hidden_TD[rows_R], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(stored_too, stored)


@STEPS
@SHAPES
@given(decoders(), st.data())
def test_bf16_is_no_further_from_fp32_than_torch(library, steps, decoder, data) -> None:
    """With bf16 weights, the hidden states are about as close to fp32's as torch's bf16, or closer."""
    plan = data.draw(steps)
    (compiled, plain), *_ = both(library, decoder, plan, torch.bfloat16)
    (_, exact), *_ = both(library, decoder.float(), plan, torch.float32)

    error, allowed = ((x.float() - exact).pow(2).mean().sqrt() for x in (compiled, plain))

    assert error <= 1.5 * allowed + 0.02 * exact.pow(2).mean().sqrt()


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_int8_stays_near(library, rows) -> None:
    """int8 changes the hidden states by a few percent, in gemv and in gemm."""
    torch.manual_seed(1)
    decoder = Decoder(replace(ODD, qkv_bias=True)).eval()

    (compiled, plain), *_ = both(library, decoder, prompt_of(rows), torch.float32, "int8")

    assert 0 < (compiled - plain).pow(2).mean().sqrt() < 0.05 * plain.pow(2).mean().sqrt()


@SHAPES
@given(
    st.integers(1, 70),
    st.sampled_from([1, 16, 31, 64, 100]),
    st.integers(1, 90),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_scores_equal_torch(library, rows, size, width, dtype) -> None:
    """Products of rows and a matrix of any shape equal torch's product of the same numbers in fp32."""
    torch.manual_seed(rows)
    x, weight = (torch.randn(n, size).to(getattr(torch, dtype)) for n in (rows, width))

    scores = library.score(x, weight)

    torch.testing.assert_close(scores, x.float() @ weight.float().T, atol=1e-3, rtol=1e-4)


def test_many_rows_sum_as_exactly_as_few(library) -> None:
    """gemm's error against fp64 is below twice gemv's, also for long fp32 rows."""
    torch.manual_seed(0)
    x, weight = torch.rand(64, 3_072), torch.rand(64, 3_072)
    exact = x.double() @ weight.double().T

    packed = (library.score(x, weight) - exact).abs().mean()
    unpacked = (torch.cat([library.score(row[None], weight) for row in x]) - exact).abs().mean()

    assert packed < 2 * unpacked
