"""Private APIs of dependencies are used in one file each, which names the version that was reviewed."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USERS = {
    "services/features/layout.py": "feast",
    "services/gateway/grpc/acceptance.py": "grpcio",
    "services/gateway/rest/acceptance.py": "uvicorn",
    "services/llm/serving/affinity_router.py": "ray",
    "infra/local/servers/lean_ray.py": "ray",
    "infra/local/servers/loopback.py": "grpcio",
    "infra/local/servers/ray_ingress.py": "ray",
}
PRIVATE_IMPORT = re.compile(
    r"^ *(?:from (?!services|models|pipelines|infra|benchmarks|__future__)(?:\S*\._\S* import|\S+ import "
    r".*\b_[a-z])|import \S+\._)",
    re.MULTILINE,
)


@pytest.mark.parametrize(("file", "package"), USERS.items())
def test_a_new_version_is_read_before_it_is_used(file: str, package: str) -> None:
    """The file states the installed version: after an upgrade, someone reviews the private API and updates the text."""
    assert f"read in {package} {version(package)}." in " ".join((ROOT / file).read_text().split())


def test_nothing_else_imports_what_is_private() -> None:
    """Private imports occur only in the listed files, because an upgrade is reviewed only there."""
    folders = ("services", "models", "pipelines", "infra", "benchmarks")
    files = {path for folder in folders for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name}
    paths = {str(path.relative_to(ROOT)) for path in files if PRIVATE_IMPORT.search(path.read_text())}

    # these read a file that Ray writes, repeat a function of Feast, and extend a public class
    others = {
        "infra/local/servers/ray_ingress.py",
        "services/features/layout.py",
        "services/gateway/rest/acceptance.py",
    }
    assert paths == USERS.keys() - others
