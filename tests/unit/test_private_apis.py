"""What others keep private is used in one file each, which names the version that it was read in."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USERS = {
    "services/features/layout.py": "feast",
    "services/llm/serving/affinity_router.py": "ray",
    "infra/local/servers/loopback.py": "grpcio",
    "infra/local/servers/ray_ingress.py": "ray",
}
PRIVATE_IMPORT = re.compile(
    r"^ *(?:from (?!services|models|pipelines|infra|benchmarks|__future__)(?:\S*\._\S* import|\S+ import .*\b_[a-z])|import \S+\._)",
    re.MULTILINE,
)


@pytest.mark.parametrize(("file", "package"), USERS.items())
def test_a_new_version_is_read_before_it_is_used(file: str, package: str) -> None:
    """After an upgrade somebody compares the private API with what the file expects, runs its integration test, and writes down the version."""
    assert f"read in {package} {version(package)}." in " ".join((ROOT / file).read_text().split())


def test_nothing_else_imports_what_is_private() -> None:
    """A second file that did would break with the next version, and nobody would look there."""
    folders = ("services", "models", "pipelines", "infra", "benchmarks")
    files = {path for folder in folders for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name}
    found = {str(path.relative_to(ROOT)) for path in files if PRIVATE_IMPORT.search(path.read_text())}

    assert found == USERS.keys() - {"infra/local/servers/ray_ingress.py"}  # this one reads a file that Ray writes
