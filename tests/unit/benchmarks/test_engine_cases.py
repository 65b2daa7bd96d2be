"""The cases of the engine's benchmark: amounts, prompts, and the published workload."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.engine.cases import code_table

BARE = {"ray", "rich", "typer", "transformers", "prometheus_client", "pydantic", "pyarrow", "fastapi", "psutil"}


@pytest.mark.parametrize("vocab_size", [400, 49_152])
def test_the_catalogue_lies_in_the_vocabulary(vocab_size: int) -> None:
    """Codes are distinct, and the levels' tokens are disjoint, the last ones of the vocabulary."""
    table = code_table(vocab_size)

    assert len(np.unique(table.codes, axis=0)) == len(table.codes)
    assert table.codes.max() < table.level_size
    assert np.diff(table.token_offsets).tolist() == [table.level_size] * 2
    assert table.token_offsets[-1] + table.level_size == vocab_size


def test_the_benchmark_imports_little() -> None:
    """The command and our engine's process import only torch, numpy, safetensors and tokenizers."""
    script = (
        "import sys, benchmarks.engine, benchmarks.engine.tailrace; "
        f"sys.exit(', '.join({BARE!r} & set(sys.modules)) or 0)"
    )

    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
