"""Without compiled kernels, the engine runs on plain torch with a single warning."""

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.llm.engine.config import EngineConfig
from services.llm.engine.cpu import compiler
from tests.support.engine.engines import build_decoder, build_engine, build_items, drain


@pytest.fixture
def ranked():
    """Return a function that ranks with an engine of the given configuration."""

    def rank(**knobs) -> list[int]:
        items = build_items(3)
        engine = build_engine(build_decoder(items), items, **{"cpu_kernels": "compiled", **knobs})
        engine.add_rank("a", [0, 3, 9], k=10)
        return drain(engine)["a"].item_indices.tolist()

    return rank


def test_without_a_compiler_torch_runs_with_one_warning(ranked, tmp_path, monkeypatch, caplog) -> None:
    """Without a compiler the ranking is the same, and the log states the missing part once."""
    wanted = ranked(cpu_kernels="torch")
    monkeypatch.setenv("PATH", str(tmp_path))

    with caplog.at_level(logging.WARNING):
        result = ranked(kernel_cache=tmp_path / "cache")

    assert result == wanted
    assert [record.getMessage() for record in caplog.records] == [
        "the engine runs on plain torch, several times slower: no GCC is installed"
    ]


@pytest.mark.parametrize("has_bf16", [True, False])
def test_torch_computes_bf16_weights_in_fp32_where_the_processor_has_no_bf16(
    has_bf16, tmp_path, monkeypatch, caplog
) -> None:
    """Without bf16 instructions, torch computes in fp32; bf16 was about eighty times slower there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    decoder = build_decoder(build_items(1)).to(torch.bfloat16)

    with caplog.at_level(logging.WARNING):
        build_engine(decoder, None, cpu_kernels="compiled", kernel_cache=tmp_path / "cache")

    assert decoder.head_weight_VD.dtype == (torch.bfloat16 if has_bf16 else torch.float32)
    assert ("computed in float32" in caplog.text) == (not has_bf16)


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"kv_kind": "int8"}, "keys and values in int8"),
        pytest.param({"kernel_cache": Path("/dev/null/x")}, "null/x is not writable", marks=pytest.mark.native),
    ],
)
def test_what_the_compiled_kernels_cannot_do_is_logged(ranked, caplog, knobs, line) -> None:
    """Unsupported KV kinds and an unwritable cache folder fall back to torch with a log message."""
    with caplog.at_level(logging.WARNING):
        assert len(ranked(**knobs)) == 10

    assert line in caplog.text


@pytest.mark.native
def test_a_library_is_built_once(tmp_path, monkeypatch) -> None:
    """Concurrent starts build a library once, other sources build another library, and no scratch files remain."""
    sources, cache, build, built = tmp_path / "sources", tmp_path / "cache", compiler._build, []
    sources.mkdir()
    (sources / "short.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(compiler, "_SOURCES", sources)
    monkeypatch.setattr(compiler, "_MAIN", sources / "short.cpp")
    monkeypatch.setattr(compiler, "_build", lambda *given: (built.append(given[-1]), build(*given)))

    def start(_number: int) -> Path:
        return compiler.built_library(cache)

    try:
        with ThreadPoolExecutor(4) as starts:
            paths = {*starts.map(start, range(4)), start(4)}
    except compiler.BuildFailedError as why:
        pytest.skip(str(why))
    (sources / "more.h").touch()
    other = start(5)

    assert paths == {built[0]}
    assert built == [built[0], other]
    assert sorted(cache.iterdir()) == sorted(built)


@pytest.mark.native
def test_a_damaged_library_is_rebuilt(ranked, tmp_path, monkeypatch, caplog) -> None:
    """A library that does not load, for example after a power loss, is rebuilt at the next start."""
    try:
        good = compiler.built_library(EngineConfig().kernel_cache)
    except compiler.BuildFailedError as why:
        pytest.skip(str(why))
    damaged = tmp_path / good.name
    damaged.write_bytes(b"")
    monkeypatch.setattr(compiler, "_build", lambda _compiler, _options, library: shutil.copy(good, library))

    with caplog.at_level(logging.WARNING):
        ranked(kernel_cache=tmp_path)

    assert not caplog.records
    assert damaged.read_bytes() == good.read_bytes()
