"""Weights in 8 and 4 bits: stored codes represent the rounded weights, and the library computes with exactly these."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.decoder.decoder import Decoder
from services.errors import ConfigError
from services.llm.engine.config import EngineConfig
from services.llm.engine.cpu import compiler
from services.llm.engine.cpu.forward import CpuForward
from services.llm.engine.cpu.library import Library, MatrixStruct
from services.llm.engine.cpu.quantise import QuantisedRows, check_shape, dequantised, quantise, rounded
from services.llm.engine.forward.layers import LayerLoop
from services.llm.engine.forward.ops import TorchOps
from services.llm.engine.forward.torch_attention import TorchAttention
from services.llm.engine.forward.weights import DecoderWeights, Linear, join_weights
from tests.support.engine.attention_shapes import attention_shape
from tests.support.engine.steps import BLOCK, CPU, ODD, decoder_of, decoders, plans, prompt_of, run_step

SHAPES = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
TARGETS = compiler.suitable(platform.machine(), compiler.processor_flags())
"""Processor classes of this processor, most capable first. Every run tests the last class and the native build."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(None, id="own"),
        *(
            pytest.param(target, id=target.name, marks=[pytest.mark.grid] if target in TARGETS[:-1] else [])
            for target in TARGETS
        ),
    ],
)
def library(request, tmp_path_factory) -> Library:
    """The library for this processor or for a class that it belongs to; skipped without a compiler."""
    try:
        if request.param is None:
            return Library(compiler.built_library(EngineConfig().kernel_cache))
        return Library(compiler.build_ahead(request.param, tmp_path_factory.getbasetemp() / "targets"))
    except compiler.BuildFailedError as why:
        pytest.skip(str(why))


def matrix_of(rows: QuantisedRows) -> MatrixStruct:
    """Build a struct that points at the tensors of these rows."""
    multipliers = None if rows.multiplier_NG is None else rows.multiplier_NG.data_ptr()
    return MatrixStruct(rows.codes.data_ptr(), None, None, rows.scale_N.data_ptr(), rows.sum_N.data_ptr(), multipliers)


def quantised_rows(x_RI: Tensor) -> Tensor:
    """Round activations like the library: 127 steps each way of the row's peak, halves upwards."""
    step_R1 = x_RI.float().abs().amax(-1, keepdim=True) / 127
    return (x_RI.float() / step_R1 + 0.5).floor() * step_R1


@given(st.integers(1, 40), st.integers(1, 200), st.sampled_from([4, 8]), st.floats(1e-3, 1e3))
def test_what_is_stored_stands_for_the_rounded_weights(rows: int, size: int, bits: int, scale: float) -> None:
    """For any shape, unpacked codes equal the rounded weights bit for bit, and rounding is idempotent."""
    torch.manual_seed(rows)
    weight = torch.randn(rows, size) * scale
    weight[0] = 0

    restored = dequantised(quantise(weight, bits), size)

    assert torch.equal(restored, rounded(weight, bits))
    if bits == 8:
        torch.testing.assert_close(rounded(restored, bits), restored, rtol=1e-6, atol=0)


@given(st.integers(1, 30), st.integers(1, 200))
def test_no_group_is_further_off_than_by_the_finest_step_that_clips_nothing(rows: int, size: int) -> None:
    """Each group of 32 has at most the squared error of rounding with the finest step that does not clip."""
    torch.manual_seed(size)
    weight = torch.randn(rows, size)
    groups = torch.nn.functional.pad(weight, (0, -size % 64)).unflatten(1, (-1, 32))
    unit = weight.abs().amax(1)[:, None, None] / 126
    step = ((groups.abs().amax(2, keepdim=True) / 7 / unit) - 1e-4).ceil().clamp(1, 18) * unit

    off = (rounded(torch.nn.functional.pad(weight, (0, -size % 64)), 4).unflatten(1, (-1, 32)) - groups).pow(2).sum(2)

    plain = ((groups / step).round() * step - groups).pow(2).sum(2)
    assert (off <= plain * (1 + 1e-3) + 1e-12).all()


def test_four_bits_take_four_and_a_quarter() -> None:
    """A matrix takes the bytes of its codes and multipliers, plus eight bytes per row for scale and sum."""
    rows = quantise(torch.randn(96, 384), 4)

    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in rows if tensor is not None)

    assert num_bytes == 96 * 384 * 4.25 / 8 + 96 * 8


def test_a_decoder_too_wide_for_the_sums_is_refused() -> None:
    """The error names the field, the width and the setting to use instead."""
    wide = attention_shape(4, 2, 20, intermediate_size=70_000)

    with pytest.raises(
        ConfigError,
        match=r"weight_kind: int4 sums at most 66,311 products.*intermediate_size is 70,000; set it to model",
    ):
        check_shape(wide, "int4")
    check_shape(wide, "model")


@pytest.mark.native
@SHAPES
@given(
    st.integers(1, 70),
    st.sampled_from([1, 16, 31, 64, 65, 100, 128, 200]),
    st.integers(1, 90),
    st.sampled_from([4, 8]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.data(),
)
def test_products_equal_torch_s_of_the_rounded_numbers(library, rows, size, width, bits, dtype, data) -> None:
    """Products equal torch's for any row range of a matrix, few and many input rows, and each processor class."""
    torch.manual_seed(rows + size)
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(width, size)
    first = data.draw(st.integers(0, width - 1))
    stored = quantise(weight, bits)

    products = library.score_rows(x, matrix_of(stored), first, width)

    wanted = quantised_rows(x) @ rounded(weight, bits)[first:].T
    torch.testing.assert_close(products, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))


class RoundedOps(TorchOps):
    """Torch's operations with 8-bit activations."""

    def linear(self, x_TI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
        return super().linear(quantised_rows(x_TI).to(x_TI.dtype), weight_NI, bias_N)


def rounded_weights(weights: DecoderWeights, matrix_bits: int) -> DecoderWeights:
    """Return the rounded weights of a kind: matrices of `matrix_bits`, embedding and head of 8 bits."""
    layers = tuple(
        replace(
            layer,
            **{
                name: Linear(rounded(getattr(layer, name).weight_NI, matrix_bits), getattr(layer, name).bias_N)
                for name in ("qkv", "output", "gate_up", "down")
            },
        )
        for layer in weights.layers
    )
    embedding_VD = rounded(weights.embedding_VD, 8)
    is_tied = weights.head_VD is weights.embedding_VD
    return replace(
        weights,
        layers=layers,
        embedding_VD=embedding_VD,
        head_VD=embedding_VD if is_tied else rounded(weights.head_VD, 8),
    )


def far_apart(library: Library, decoder: Decoder, plan, kind: str, matrix_bits: int) -> float:
    """Return the relative RMS difference of the compiled hidden states from torch's with rounded weights."""
    weights = join_weights(decoder)
    exact = rounded_weights(weights, matrix_bits)
    attention = TorchAttention(8, 16, BLOCK, CPU, weights.config.window)
    compiled, *_ = run_step(lambda cache: CpuForward(library, weights, cache, kind), weights, plan)
    plain, *_ = run_step(lambda cache: LayerLoop(exact, cache, RoundedOps(), attention), exact, plan)
    return float((compiled - plain).pow(2).mean().sqrt() / plain.pow(2).mean().sqrt())


@pytest.mark.native
@SHAPES
@given(decoders(), plans(), st.sampled_from([("int4", 4), ("int8_all", 8)]))
def test_steps_equal_torch_s_of_the_rounded_numbers(library, decoder, plan, kind) -> None:
    """Hidden states equal torch's with rounded weights, up to activations that round differently."""
    assert far_apart(library, decoder, plan, *kind) < 0.02


@pytest.mark.native
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_four_bits_are_not_eight(library, rows) -> None:
    """The same comparison with another number of bits differs clearly, so the test above can fail."""
    assert far_apart(library, decoder_of(ODD), prompt_of(rows), "int4", 8) > 0.05


@pytest.mark.native
def test_bytes_in_memory_are_those_of_the_kind(library, tmp_path: Path) -> None:
    """4-bit matrices take 17/32 of int8 matrices, an int8 table a quarter of fp32; a tied head counts once."""
    sizes = {"vocab_size": 640, "hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True}
    decoder = Decoder(attention_shape(4, 4, 64, **sizes)).eval()
    weights = join_weights(decoder)
    small = (2 * weights.config.num_hidden_layers + 1) * 256 * 4 + 4 * 32  # norms and periods

    forwards = {}
    for kind in ("model", "int8", "int8_all", "int4"):
        run_step(
            lambda cache, kind=kind: forwards.setdefault(kind, CpuForward(library, weights, cache, kind)),
            weights,
            prompt_of(3),
        )

    num_layers = weights.config.num_hidden_layers
    matrices, rows = num_layers * (4 * 256 * 256 + 3 * 256 * 512), num_layers * (4 * 256 + 2 * 512 + 256)
    table = 640 * 256
    assert {kind: forward.weight_bytes for kind, forward in forwards.items()} == {
        "model": 4 * (matrices + table) + small,
        "int8": matrices + 8 * rows + 4 * table + small,
        "int8_all": matrices + 8 * rows + table + 8 * 640 + small,
        "int4": matrices * 17 // 32 + 8 * rows + table + 8 * 640 + small,
    }
