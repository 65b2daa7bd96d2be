"""The stack that the tests share: built by the real pipeline and started once per run."""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import structlog
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from models.registry.store import BundleStore
from tests.support.stacks.compose_stack import ComposeStack, why_not
from tests.support.stacks.stack import TEXT_MAX_TOKENS, TEXT_MODEL, Stack

if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which also transformers does

for profile, num_examples in (("quick", 50), ("thorough", 200)):
    hypothesis_settings.register_profile(
        profile,
        max_examples=num_examples,
        deadline=None,  # a busy machine is not a fault of the tested code
        suppress_health_check=[HealthCheck.too_slow],
    )
hypothesis_settings.load_profile("quick")  # `make test-grids` takes the thorough one

E2E_TIMEOUT_S = 1_800
EMBEDDED_ONLY = {
    "test_stack_lifecycle.py": "is about `tailrace up` and its processes; tests/compose has its own",
    "test_chaos.py": "puts proxies between the parts of the embedded stack",
    "test_kubernetes_pods.py": "takes the bundle from the state folder, which in compose is a volume",
    "test_nodes.py": "starts a cluster of its own with the embedded stack's state",
    "test_docs.py": "runs the pages' commands, which name the embedded stack's ports",
    "test_cold_start.py": "starts an embedded stack of its own",
    "test_console.py": "opens pages without an API key",
    "test_console_editor.py": "opens pages without an API key",
    "test_console_releases.py": "publishes into the state folder, which in compose is a volume",
    "test_experiments.py": "reads the log, which in compose is a volume; tests/compose writes surfaces and experiments",
    "test_release.py": "publishes into the state folder, which in compose is a volume",
    "test_listening.py": "looks for processes of this machine, and sends no API key",
    "test_takeover.py": "looks for processes of this machine",
    "test_names.py": "starts a second embedded stack, with names of its own",
    "test_tenants.py": "starts a second embedded stack, with tenants",
    "test_text.py": "asks for the text model of the embedded stack; tests/compose asks containers for text",
    "test_doors.py::test_the_printed_calls_work_when_pasted": "is about what `tailrace up` prints",
    "test_doors.py::test_status_shows_every_part": "is about `tailrace status`",
}
"""Reasons, by file or by file and test, why end-to-end tests run only on the embedded stack; others
run on compose too.
"""
LONGEST = (
    *("test_workers.py", "test_worker_faults.py", "test_erasure.py", "test_offline_pipeline.py"),
    *("test_deployments.py", "test_judge.py", "test_release.py", "test_object_store.py", "test_impressions.py"),
)
"""Tests of half a minute and more, longest first: processes start with these, so that none runs one at the end."""
BUDGET_S = tomllib.loads(Path(__file__).with_name("budget.toml").read_text())
SHORT_TRAINING = ("--epochs", "1", "--student-epochs", "1", "--no-refit", "--force")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a developer keep the trained bundle between runs."""
    parser.addoption(
        "--state", type=Path, help="state folder of the tests' stack, kept afterwards (default: temporary)"
    )
    parser.addoption("--foreign-inputs", type=int, help="inputs of each parser in -m grid (default: 3,000)")
    parser.addoption("--stack", choices=("embedded", "compose"), default="embedded", help="what e2e tests run against")
    parser.addoption("--project", help="compose: the project, whose volumes are kept afterwards (default: temporary)")
    parser.addoption("--compose-override", type=Path, action="append", default=[], help="compose: one more file")
    parser.addoption("--built", action="store_true", help="compose: take the images that are there")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests below integration, e2e and compose, and order them by their use of the stack.

    Compose tests may wait for the pipeline. Tests that need the stack run last, so that they do not take the cores from
    others; tests that end the stack run after all others.
    """
    for item in items:
        if "integration" in item.path.parts:
            item.add_marker(pytest.mark.integration)
        if {"e2e", "compose"} & set(item.path.parts):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))
    if config.getoption("--stack") == "compose":
        for item in items:
            name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
            if reason := EMBEDDED_ONLY.get(item.path.name) or EMBEDDED_ONLY.get(name):
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: [name in getattr(item, "fixturenames", ()) for name in ("interrupted", "stack")])
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=lambda item: next((at for at, part in enumerate(LONGEST) if part in item.nodeid), len(LONGEST)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each phase, summed over processes, next to its budget."""
    spent: dict[str, float] = dict.fromkeys(BUDGET_S, 0.0)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                for phase in BUDGET_S.keys() & {*Path(report.location[0]).parts}:
                    spent[phase] += report.duration
    for phase, seconds in spent.items():
        if seconds:
            terminalreporter.write_line(f"{phase}: {seconds:.0f} s of a budget of {BUDGET_S[phase]} s")


@pytest.fixture(autouse=True)
def same_log_settings() -> Iterator[None]:
    """Undo what a test's code sets for the log: a higher level would drop lines that later tests capture."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A running stack with two gateway replicas, on a bundle of one epoch on ml-100k; tests/quality trains in full.

    It also serves text of a tiny random checkpoint, and has empty surfaces and experiments files.
    """
    if request.config.getoption("--stack") == "compose":
        yield from composed(request.config, empty_surfaces(tmp_path_factory))
        return
    from tests.support.engine.checkpoints import write_checkpoint

    kept: Path | None = request.config.getoption("--state")
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("text") / TEXT_MODEL, max_positions=4_096)
    folder = empty_surfaces(tmp_path_factory)
    running = Stack(
        (kept or tmp_path_factory.mktemp("stack")).absolute(),
        gateway_replicas=2,
        text_path=str(checkpoint),
        text_max_tokens=TEXT_MAX_TOKENS,
        surfaces_file=folder / "surfaces.toml",
        experiments_file=folder / "experiments.toml",
        release_look_s=1.0,
        release_lead_s=3.0,
    )
    try:
        if BundleStore(running.settings.bundle_root).live_version() is None:
            trained = running.command("pipeline", *SHORT_TRAINING, timeout_s=E2E_TIMEOUT_S)
            assert trained.returncode == 0, trained.stdout + trained.stderr
        running.start()
        yield running
    finally:
        running.close()


def empty_surfaces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with both files of surfaces and experiments, readable by the user of a container."""
    folder = tmp_path_factory.mktemp("surfaces")
    folder.chmod(0o755)
    for name in ("surfaces.toml", "experiments.toml"):
        (folder / name).touch()
    return folder


def composed(config: pytest.Config, surfaces: Path) -> Iterator[Stack]:
    """The same stack in containers; skips without a Docker engine."""
    if reason := why_not():
        pytest.skip(reason)
    kept: str | None = config.getoption("--project")
    running = ComposeStack(
        kept or f"tailrace-test-{uuid4().hex[:8]}",
        [path.absolute() for path in config.getoption("--compose-override")],
        surfaces,
        keep=kept is not None,
        build=not config.getoption("--built"),
    )
    try:
        running.start(*SHORT_TRAINING)
        yield running
    finally:
        running.close()
