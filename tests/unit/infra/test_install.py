"""Run with: pytest tests/unit/infra/test_install.py"""

import io
import sys
from pathlib import Path

import pytest

from infra.install import install, num_pins

PIP_SAYS = """
print("Collecting torch==1")
print("  Downloading torch-1.whl (500 MB)")
print("Requirement already satisfied: rich==2 in somewhere")
print("Installing collected packages: torch, rich")
print("Successfully installed torch-1")
"""


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


def said_by(script: str) -> tuple[str, ...]:
    """A command in pip's place."""
    return (sys.executable, "-c", script)


def test_terminal_sees_one_line(tmp_path: Path) -> None:
    """Written again for each package; the list is in the log."""
    out = Terminal()

    status = install(said_by(PIP_SAYS), 2, tmp_path / "install.log", out)

    first, *_, last = out.getvalue().split("\r")[1:]
    assert status == 0
    assert (first[:12], last[:12]) == ("downloading ", "unpacking   ")
    assert "2/2 packages" in last
    assert out.getvalue().count("\n") == 1
    assert "500 MB" in (tmp_path / "install.log").read_text()


def test_elsewhere_a_line_for_each_phase(tmp_path: Path) -> None:
    """A log of CI is not filled."""
    out = io.StringIO()

    install(said_by(PIP_SAYS), 2, tmp_path / "install.log", out)

    *phases, end = out.getvalue().splitlines()
    assert phases == ["downloading 2 packages", "unpacking 2 packages"]
    assert end.endswith(" s in all")


def test_failure_shows_what_pip_said_last(tmp_path: Path) -> None:
    """The error is there without opening the log, which is named; so is what went to stderr."""
    out = io.StringIO()
    script = 'import sys; print("Collecting x"); print("ERROR: No matching distribution", file=sys.stderr); sys.exit(1)'

    status = install(said_by(script), 3, tmp_path / "install.log", out)

    assert status == 1
    assert "ERROR: No matching distribution" in out.getvalue()
    assert str(tmp_path / "install.log") in out.getvalue()


@pytest.mark.parametrize(("lock", "num"), [("# made\na==1\nb==2\n", 2), ("a==1\n\n", 1)])
def test_packages_are_counted(tmp_path: Path, lock: str, num: int) -> None:
    """Comments and empty lines are none."""
    (tmp_path / "lock").write_text(lock)

    assert num_pins(tmp_path / "lock") == num
