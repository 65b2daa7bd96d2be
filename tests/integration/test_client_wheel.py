"""The client's wheel, installed with its requirements in a separate environment.

Run: `pytest tests/integration/test_client_wheel.py`.
"""

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.gateway.plain_doors import running_plain_doors
from tests.support.servers import HOST

ROOT = Path(__file__).parents[2]
THREE_LINES = """
import json, sys
from google.protobuf import descriptor_pool
from tailrace_client import Client, Event, TailraceError

told = {}
for address in sys.argv[1:]:
    with Client(address) as tailrace:
        answer = tailrace.recommend("long", k=3, deadline_ms=5000)
        event = Event("long", answer.items[0].item_id, request_id=answer.request_id)
        recorded = tailrace.record(event)
        try:
            tailrace.recommend("long", k=-1)
        except TailraceError as error:
            told[address] = [answer.tier, len(answer.items), recorded.event_ids == (event.event_id,), error.field]
ours = {"services", "models", "infra", "google.rpc", "grpc_status", "pydantic"} & set(sys.modules)
try:
    descriptor_pool.Default().FindFileByName("services/contracts/recommend.proto")
    ours.add("the default descriptor pool")
except KeyError:
    pass
print(json.dumps([told, sorted(ours)]))
"""


def needed(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that these requirements need, recursively."""
    distributions: dict[str, metadata.Distribution] = {}
    ahead = list(requirements)
    while ahead:
        requirement = Requirement(ahead.pop())
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in distributions:
            distributions[requirement.name] = metadata.distribution(requirement.name)
            assert requirement.specifier.contains(distributions[requirement.name].version), requirement
            ahead += distributions[requirement.name].requires or []
    return distributions


def copy_installed(distribution: metadata.Distribution, site: Path) -> None:
    for file in distribution.files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), site / file)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has only the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "services/client", folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source"], check=True
    )
    (wheel,) = folder.glob("tailrace_client-*.whl")
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv/lib").glob("*/site-packages")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", "--target", site, wheel], check=True)
    (installed,) = metadata.distributions(path=[str(site)])
    for distribution in needed(installed.requires or []).values():
        copy_installed(distribution, site)
    return folder / "venv/bin/python"


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    """REST and gRPC, in a separate process."""
    with running_plain_doors() as (http_port, grpc_port):
        yield [f"http://{HOST}:{http_port}", f"grpc://{HOST}:{grpc_port}"]


@pytest.mark.grid  # test_architecture.py imports the client without our packages
def test_the_wheel_works_with_only_what_it_names(python: Path, addresses: list[str]) -> None:
    """The wheel works over REST and gRPC without our packages, and registers no conflicting protobuf message."""
    done = subprocess.run(
        [python, "-I", "-c", THREE_LINES, *addresses], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.returncode == 0, done.stderr
    answers, ours = json.loads(done.stdout)
    assert answers == {address: ["llm", 3, True, "k"] for address in addresses}
    assert ours == []
