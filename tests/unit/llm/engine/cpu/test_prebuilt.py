"""Prebuilt libraries are used without a compiler if they match, and ignored otherwise."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.llm.engine.cpu import compiler
from services.llm.engine.cpu.compiler import Target, suitable
from services.llm.engine.cpu.library import Library

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parents[5]


@pytest.fixture(scope="module")
def own_target() -> Target:
    """The least capable target of this processor: used if better targets are missing, and the fastest to build."""
    targets = suitable(platform.machine(), compiler.processor_flags())
    return targets[-1] if targets else pytest.skip("no target for this processor")


def run_prebuild(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run the prebuild command in a separate interpreter."""
    command = [sys.executable, "-m", "services.llm.engine.cpu.prebuild", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_command_needs_only_its_own_folder(tmp_path: Path) -> None:
    """The image's stage of kernels copies no other source, and imports no package before the build."""
    folder = tmp_path / "services" / "llm" / "engine" / "cpu"
    shutil.copytree(Path(compiler.__file__).parent, folder, ignore=shutil.ignore_patterns("prebuilt"))
    command = [sys.executable, "-S", "-c", "import services.llm.engine.cpu.prebuild"]

    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={})

    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(own_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library for this processor, built by the command; skipped without a compiler."""
    done = run_prebuild(str(tmp_path_factory.mktemp("built")), own_target.name)
    if "no GCC" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def prebuilt(built: Path, tmp_path: Path) -> Path:
    """A copy of the folder of built libraries."""
    return Path(shutil.copytree(built.parent, tmp_path / "prebuilt"))


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_one_for_this_processor_is_used_without_a_compiler(own_target, built, prebuilt, tmp_path) -> None:
    """A matching library loads without a compiler, computes torch's products, and writes no files."""
    path = compiler.built_library(tmp_path / "cache", prebuilt)
    x, weight = torch.randn(3, 70), torch.randn(9, 70)

    assert path == prebuilt / built.name
    assert own_target.name in path.name
    torch.testing.assert_close(Library(path).score(x, weight), x @ weight.T)
    assert not (tmp_path / "cache").exists()


def test_torch_s_openmp_counts_beside_another() -> None:
    """The OpenMP runtime of torch counts, also if scikit-learn has loaded its own."""
    program = """
import torch, sklearn.cluster
from services.llm.engine.cpu.compiler import _loaded_openmp
print(sum("scikit" in line for line in open("/proc/self/maps")) > 0, _loaded_openmp())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)

    is_other_loaded, path = done.stdout.split()
    assert is_other_loaded == "True"
    assert "torch" in Path(path).parts


@pytest.mark.parametrize("difference", ["sources", "openmp", "processor"])
@pytest.mark.usefixtures("no_compiler")
def test_one_that_does_not_fit_is_not_used(prebuilt, tmp_path, monkeypatch, difference) -> None:
    """A library for other sources, another OpenMP runtime or a better processor is ignored."""
    if difference == "sources":
        sources = Path(shutil.copytree(compiler.PREBUILT.parent, tmp_path / "sources"))
        (sources / "row_ops.h").write_text((sources / "row_ops.h").read_text() + "\n// changed\n")
        monkeypatch.setattr(compiler, "_SOURCES", sources)
    elif difference == "openmp":
        monkeypatch.setattr(compiler, "_loaded_openmp", lambda: Path("/lib/libgomp-other.so.1"))
    else:
        monkeypatch.setattr(compiler, "processor_flags", frozenset)
        if suitable(platform.machine(), frozenset()):
            pytest.skip("one build serves all processors of this architecture")

    with pytest.raises(compiler.BuildFailedError, match="no GCC"):
        compiler.built_library(tmp_path / "cache", prebuilt)
