"""The Dockerfile against the project."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[4]
DOCKERFILE = (ROOT / "infra" / "docker" / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def stage(name: str) -> str:
    """Return the instructions of a build stage, its FROM line included."""
    (found,) = re.findall(rf"^(FROM \S+ AS {name}\n(?:(?!FROM ).*\n)*)", DOCKERFILE, re.MULTILINE)
    return re.sub(r"^#.*\n|^\n", "", found, flags=re.MULTILINE)


def test_every_package_is_held_by_a_lock() -> None:
    """The lock's first part by hashes and as wheels, torch by version from one index alone; nothing else is downloaded."""
    hashed, torch = re.findall(r"pip install (.+?)(?: \\)?$", DOCKERFILE, re.MULTILINE)
    (cut,) = re.findall(r"sed '/\^(.+)\$/,\$d' /requirements.lock > /image.lock", DOCKERFILE)

    assert hashed == "--require-hashes --no-deps --only-binary :all: -r /image.lock"
    assert torch == '${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} -c /requirements-torch.lock torch'
    assert (ROOT / "requirements.lock").read_text().splitlines().count(cut) == 1
    assert not re.search(r"apt-get|apk |curl |wget |https?://", DOCKERFILE)


def test_what_is_copied_is_not_ignored() -> None:
    """The build context has each file that the Dockerfile names, and each package."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    named = set(re.findall(r"(?:requirements[\w-]*\.lock|infra/docker/[\w.]+)", DOCKERFILE))

    assert {"requirements.lock", "requirements-torch.lock"} <= named
    assert all(path.split("/")[0] in let_in and (ROOT / path).is_file() for path in named)
    assert {"services", "models", "pipelines", "infra", "feature_repo"} <= let_in
