"""How Feast is imported: `pytest tests/unit/features/test_light_feast.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED, ASKED_FOR = "PROMETHEUS_MULTIPROC_DIR", "PROMETHEUS_MULTIPROCESS_DIR"
PROGRAM = """
import json, os, sys
from prometheus_client import Counter
from services.features.light_feast import import_feast
import_feast()
Counter("ours", "made afterwards").inc()
print(json.dumps({"torch": "torch" in sys.modules, "names": [os.environ.get(name) for name in sys.argv[1:]]}), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("is_sharing", [True, False])
def test_it_leaves_nothing_behind(tmp_path: Path, is_sharing: bool) -> None:
    """No torch, no variable, and no folder or file of Feast's, even in a process that is killed."""
    temporary, shared = tmp_path / "tmp", tmp_path / "shared"
    temporary.mkdir()
    shared.mkdir()
    unset = {name: value for name, value in os.environ.items() if name not in (SHARED, ASKED_FOR)}
    environment = unset | {"TMPDIR": str(temporary)} | ({SHARED: str(shared)} if is_sharing else {})

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, SHARED, ASKED_FOR], env=environment, capture_output=True, text=True, check=False
    )

    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == {"torch": False, "names": [str(shared) if is_sharing else None, None]}
    assert list(temporary.iterdir()) == []
    assert [path.name.split("_")[0] for path in shared.iterdir()] == (["counter"] if is_sharing else [])
