"""Arguments of the benchmark commands, and the options that their descriptions name."""

import argparse
import ast
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.load.command import above_zero, at_least_one, host_and_port

ROOT = Path(__file__).parents[3]
COMMANDS = [path for path in sorted((ROOT / "benchmarks").rglob("*.py")) if "add_argument(" in path.read_text()]


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        (above_zero, ("0", "-1", "nan", "inf", "x", "")),
        (at_least_one, ("0", "-3", "1.5", "nan", "x")),
        (host_and_port, ("", "localhost", "localhost:", ":80", "localhost:http", "http://localhost")),
    ],
)
def test_an_invalid_argument_is_quoted(read: Callable[[str], object], wrong: tuple[str, ...]) -> None:
    """The message quotes the invalid value; argparse adds the option."""
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"{text!r} is not ")):
            read(text)


@pytest.mark.parametrize(
    ("command", "given", "why"),
    [
        ("faults", "--nodes 2", "a head and two nodes with replicas are 3 at least"),
        ("faults", "--fault first-node-cut", "no fault without --nodes"),
        ("faults", "--nodes 3 --fault store-hang", "no fault with --nodes"),
        ("quality", "--sequences shop --items i.csv", "--sequences: not together with --events and --items; leave"),
        ("quality", "--seeds 0", "argument --seeds: '0' is not a whole number from 1 on"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    command: str, given: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the argument and the reason."""
    monkeypatch.setattr(sys, "argv", ["it", "--json", "out.json", *given.split()])

    with pytest.raises(SystemExit):
        import_module(f"benchmarks.{command}.__main__").main()

    assert why in capsys.readouterr().err


def test_a_command_has_the_options_of_its_description() -> None:
    """Each option named in a command's description is defined."""
    assert len(COMMANDS) > 5
    for path in COMMANDS:
        tree = ast.parse(path.read_text())
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        strings = (word.value for call in calls for word in call.args if isinstance(word, ast.Constant))
        strings = [*strings, "--json", "--url", "--grpc", "--up"]  # defined by benchmarks/load
        named = set(re.findall(r"--[a-z][a-z-]*", ast.get_docstring(tree) or ""))

        assert named <= {word for word in strings if isinstance(word, str)}, path
