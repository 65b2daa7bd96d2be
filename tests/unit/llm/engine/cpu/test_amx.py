"""AMX: the micro-kernel with emulated instructions, the real instructions in the compiler's output, and its self-test.

On a processor with AMX, the library's other tests run it natively.
"""

import logging
import platform
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.llm.engine.cpu import compiler, library
from services.llm.engine.cpu.compiler import Target
from services.llm.engine.cpu.forward import CpuForward
from services.llm.engine.cpu.library import Amx, Library
from services.llm.engine.forward.weights import join_weights
from tests.support.engine.steps import decoders, plans, run_step

pytestmark = pytest.mark.native

HEADER = Path(__file__).parent / "emulated_tiles.h"
SOURCE = Path(library.__file__).parent / "forward.cpp"
STEPS = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def emulating(folder: Path, *options: str) -> Path:
    """Build the library with emulated tiles, once; skip if that is not possible."""
    if "avx512bw" not in compiler.processor_flags():
        pytest.skip("the emulated tiles use panels packed with AVX-512")
    defined = f'-DTAILRACE_EMULATED_TILES="{HEADER}"'
    target = Target("emulated", platform.machine(), ("-march=native", "-O0", defined, *options))
    try:
        return compiler.build_ahead(target, folder)
    except compiler.BuildFailedError as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(scope="module")
def tiles(folder) -> Library:
    """The library with emulated tiles that pass its self-test."""
    return Library(emulating(folder))


@pytest.fixture(scope="module")
def vectors(folder) -> Library:
    return Library(emulating(folder, "-DTAILRACE_REFUSED_TILES"))


@STEPS
@given(st.integers(1, 90), st.sampled_from([2, 16, 32, 64, 70, 96, 160]), st.integers(1, 90))
def test_products_by_tiles_equal_torch(tiles, rows, size, width) -> None:
    """Products of rows and a matrix of any shape equal torch's, for full tiles, partial tiles and odd sizes."""
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, size).bfloat16(), torch.randn(width, size).bfloat16()

    scores = tiles.score(x, weight)

    assert tiles.amx is Amx.ON
    torch.testing.assert_close(scores, x.float() @ weight.float().T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("weight_kind", ["model", "int8", "int8_all", "int4"])
@STEPS
@given(decoders(), plans())
def test_steps_by_tiles_equal_steps_by_vectors(tiles, vectors, weight_kind, decoder, plan) -> None:
    """For any family, shape and step, tiles and vectors agree to bf16's precision."""
    weights = join_weights(decoder.bfloat16())

    by_tiles, by_vectors = (
        run_step(lambda cache, chosen=chosen: CpuForward(chosen, weights, cache, weight_kind), weights, plan)[0].float()
        for chosen in (tiles, vectors)
    )

    assert (by_tiles - by_vectors).pow(2).mean().sqrt() <= 0.05 * by_vectors.pow(2).mean().sqrt()


@pytest.mark.parametrize(
    ("cause", "amx", "line"),
    [
        ("REFUSED", Amx.REFUSED, "the operating system does not permit its registers"),
        ("WRONG", Amx.WRONG, "its results differ from those of the vector instructions"),
    ],
)
def test_refused_or_wrong_tiles_are_not_used_and_logged(folder, caplog, cause, amx, line) -> None:
    """Products stay correct if tile registers are denied or tiles compute wrong results, and a warning is logged."""
    path = emulating(folder, f"-DTAILRACE_{cause}_TILES")
    x, weight = torch.randn(40, 64).bfloat16(), torch.randn(32, 64).bfloat16()

    with caplog.at_level(logging.WARNING):
        loaded = Library(path)

    assert loaded.amx is amx
    assert [record.getMessage() for record in caplog.records] == [
        f"the engine runs without AMX, several times slower at prompts: {line}"
    ]
    torch.testing.assert_close(loaded.score(x, weight), x.float() @ weight.float().T, atol=1e-3, rtol=1e-4)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86's")
def test_the_real_instructions_are_compiled(tmp_path) -> None:
    """For a processor with AMX, the compiler emits bf16 and int8 tile instructions and releases the registers."""
    assembly = tmp_path / "forward.s"
    options = ("-O0", "-std=c++17", "-march=sapphirerapids", "-w", "-S", str(SOURCE), "-o", str(assembly))
    try:
        subprocess.run(("g++", *options), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no GCC that supports AMX")

    text = assembly.read_text()

    assert all(name in text for name in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease"))
