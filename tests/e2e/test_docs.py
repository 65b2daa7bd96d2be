"""Run the unmarked command blocks of each page against the tests' stack: `pytest tests/e2e/test_docs.py`.

A page is one shell session: its blocks run in order, in a scratch folder that looks like the repository, and keep the
exports and the working folder of the previous block. The page's localhost:8000 maps to the tests' port.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.local.supervisor.ports import INNER_PORTS, PUBLIC_PORTS
from services.settings.settings import Settings, inherited_environment
from tests.support.documented import runnable
from tests.support.pages import ROOT, Block, all_pages, blocks, missing_lines
from tests.support.servers import free_port
from tests.support.stacks.stack import Stack

BLOCK_TIMEOUT_S = 600
NOT_IN_SCRATCH = {".git", ".tailrace", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache"}
EXIT_CODE = re.compile(r"\(exit code (\d+)\)")
FURTHER_PORTS = (8443, 9443)
"""Ports that pages use in addition to the defaults; each run maps them to free ports."""
SESSION = """
set -eo pipefail
[ ! -f "$DOCS_SESSION" ] || . "$DOCS_SESSION"
trap 'code=$?; { export -p; printf "cd %q\\n" "$PWD"; } > "$DOCS_SESSION"; exit $code' EXIT
"""


def runs(page: Path) -> bool:
    return any(runnable(block.text).strip() for block in blocks(page.read_text()) if not block.mark)


TRAINS = {ROOT / "docs" / name for name in ("bring-your-own-data.md", "bring-your-own-model.md")}
"""The pages that train models and start their own stack."""
RUNBOOKS = ROOT / "docs/runbooks"
SAMPLED = {RUNBOOKS / f"{name}.md" for name in ("TailraceAgreementBurn", "TailraceDeadLetters", "TailraceDegraded")}
"""Runbooks that run each time; test_runbooks.py and test_documented.py hold the commands and names of all."""


def is_of_grid(page: Path) -> bool:
    return page in TRAINS or (page.parent == RUNBOOKS and page not in SAMPLED)


PAGES = [
    pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=[pytest.mark.grid] if is_of_grid(page) else [])
    for page in all_pages()
    if runs(page)
]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_written(stack: Stack, page: Path, tmp_path: Path) -> None:
    """Each block exits with 0 (or the page's code) and prints the page's expected lines."""
    session = PageSession(stack, tmp_path, has_own_stack=page in TRAINS)

    failures = []
    try:
        for block in blocks(page.read_text()):
            if not block.mark and not failures:
                failures += session.run(block)
    finally:
        session.end()

    assert failures == [], f"in {page.relative_to(ROOT)}"


class PageSession:
    """A reader's shell in its own folder."""

    def __init__(self, stack: Stack, folder: Path, *, has_own_stack: bool) -> None:
        self._has_own_stack = has_own_stack
        self._ports = ports_for(stack.settings)
        self._folder = folder / "tailrace"
        self._folder.mkdir()
        for path in ROOT.iterdir():
            if path.name not in NOT_IN_SCRATCH:
                (self._folder / path.name).symlink_to(path)
        inherited = inherited_environment()
        set_here = stack.settings.as_environment()
        if has_own_stack:
            for name in INNER_PORTS:
                del set_here[f"TAILRACE_{name.upper()}"]
            set_here |= {f"TAILRACE_{name.upper()}": str(free_port()) for name in PUBLIC_PORTS}
        self._environment = {
            **inherited,
            **set_here,
            "PATH": f"{Path(sys.executable).parent}:{inherited['PATH']}",
            "DOCS_SESSION": str(folder / "session.sh"),
            "COLUMNS": "160",
        }

    def run(self, block: Block) -> list[str]:
        """Run a block; return its differences from the page."""
        script = runnable(block.text, has_own_stack=self._has_own_stack)
        if not script.strip():
            return []
        code, output = self._shell(self._with_ports(script))
        expected = [self._with_ports(line) for line in block.expected]
        wanted_code = 0
        if expected and (stated := EXIT_CODE.fullmatch(expected[-1])):
            wanted_code = int(stated[1])
            expected.pop()
        if code == wanted_code and not missing_lines(tuple(expected), output):
            return []
        missing = "".join(f"\n  missing: {line}" for line in missing_lines(tuple(expected), output))
        return [f"line {block.line}: exit code {code}, not {wanted_code}{missing}\n{script}--- output\n{output}"]

    def end(self) -> None:
        """End the page's own stack, which a failed block may have left running."""
        if self._has_own_stack:
            self._shell("tailrace down\n")

    def _shell(self, script: str) -> tuple[int, str]:
        process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-c", SESSION + script],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=BLOCK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -1, f"not finished within {BLOCK_TIMEOUT_S} s\n{process.communicate()[0]}"
        return process.returncode, output

    def _with_ports(self, text: str) -> str:
        """Replace the default ports by the tests' ports, after a host's colon or a setting's sign."""
        return re.sub(r"(?<=[:=])(\d{4,5})\b", lambda match: str(self._ports.get(int(match[1]), match[1])), text)


def ports_for(settings: Settings) -> dict[int, int]:
    """Map the ports that pages name, defaults and further ports, to ports of this run."""
    usual = Settings.model_construct()  # the defaults, regardless of the environment
    ports = {
        getattr(usual, name): getattr(settings, name)
        for name in ("http_port", "grpc_port", "metrics_port", "redis_port")
    }
    ports[int(usual.kafka_bootstrap.rpartition(":")[2])] = int(settings.kafka_bootstrap.rpartition(":")[2])
    return {**{port: free_port() for port in FURTHER_PORTS}, **ports}
