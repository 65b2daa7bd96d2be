"""What the benchmarks' commands take as numbers and addresses. argparse names the option in front of what these raise.

Standard library alone: the engine's benchmark runs where nothing else is.
"""

import argparse
import math
from pathlib import Path


def above_zero(text: str) -> float:
    """Read a rate or a time. Raises ArgumentTypeError."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def at_least_one(text: str) -> int:
    """Read a count. Raises ArgumentTypeError."""
    value = _number(text)
    if not value.is_integer() or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(value)


def host_and_port(text: str) -> tuple[str, int]:
    """Read HOST:PORT, `http://` before it or not. Raises ArgumentTypeError."""
    host, _, port = text.removeprefix("http://").removesuffix("/").rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT; give such as localhost:8000")
    return host, int(port)


def results_file(description: str) -> Path:
    """Read the command line of a program that prints one results file as a page."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("file", type=Path, help="a results file, such as the one in benchmarks/results")
    path: Path = parser.parse_args().file
    if not path.is_file():
        parser.error(f"argument file: there is no file {path}")
    return path


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
