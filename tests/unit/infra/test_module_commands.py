"""The modules that an operator starts by `python -m` end with one line, not with a traceback."""

import importlib
import signal
import sys
from pathlib import Path

import pytest

MODULES = [
    "infra.kafka.topics",
    "infra.local.edge.__main__",
    "infra.local.edge.admin",
    "infra.local.servers.metrics",
    "infra.local.servers.node",
    "infra.local.standby.__main__",
    "pipelines.release.__main__",
    "services.stream.__main__",
]
OPTIONS = {"infra.local.edge.admin": ["out", "10.0.0.11"], "infra.local.servers.node": ["serve", "--nodes", "2"]}
TOKEN = ["environment", "--standby-host", "10.0.0.1", "--token-file", "absent.token"]


def ended(monkeypatch: pytest.MonkeyPatch, module: str, words: list[str]) -> object:
    """Return the exit code or the last line of a module's `main`."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            importlib.import_module(module).main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    return end.value.code


@pytest.mark.parametrize("module", MODULES)
def test_a_wrong_setting_ends_a_module_with_one_line(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """The line names the setting, the problem and the fix."""
    monkeypatch.setenv("TAILRACE_HTTP_PORT", "abc")

    assert ended(monkeypatch, module, OPTIONS.get(module, [])) == (
        "TAILRACE_HTTP_PORT: 'abc' is not a whole number; give digits, such as 8"
    )


@pytest.mark.parametrize(
    ("module", "words", "line"),
    [
        ("infra.local.servers.node", ["serve", "--nodes", "0"], "--nodes: 0 is out of range; give 1 or more"),
        ("infra.local.servers.node", TOKEN, "--token-file: no file absent.token; write the cluster's token to it"),
        ("infra.local.edge.admin", ["out", "10.0.0.11"], "TAILRACE_STATE_DIR: no edge answers in "),
    ],
)
def test_a_wrong_option_of_a_node_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, words: list[str], line: str
) -> None:
    """No configuration is printed for a cluster without nodes or token; without an edge the setting is named."""
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path))

    assert str(ended(monkeypatch, module, words)).startswith(line)
