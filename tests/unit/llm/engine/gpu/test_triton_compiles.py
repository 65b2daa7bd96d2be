"""Every kernel compiles for a Hopper GPU, on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[5]


def test_every_kernel_compiles_for_a_hopper(tmp_path: Path) -> None:
    """The engine's kernel calls for Qwen3-1.7B's heads, all cache kinds and a window compile and fit shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engine.compile_kernels"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    assert compiled == {"_rms_norm", "_silu_mul", "_rope_and_store", "_attend_split", "_merge_states"}
