"""The stack that the tests share: built by the real pipeline and started once per run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack

if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which transformers does too

E2E_TIMEOUT_S = 1_800


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a developer keep the trained bundle between runs."""
    parser.addoption(
        "--state", type=Path, help="state folder of the tests' stack, kept afterwards (default: a new one)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests below e2e are marked so, and may wait for the pipeline; all that need the stack run last, so that it does not
    take the cores from the others.
    """
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
    items.sort(key=lambda item: "stack" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A running stack with two gateway replicas; the offline pipeline runs once, at full quality, on ml-100k."""
    kept: Path | None = request.config.getoption("--state")
    running = Stack((kept or tmp_path_factory.mktemp("stack")).absolute(), gateway_replicas=2)
    try:
        running.start()
        yield running
    finally:
        running.close()
