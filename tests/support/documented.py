"""Check the commands of a page, and drop lines that a test cannot run alongside others.

Matches words; does not parse the shell.
"""

import importlib.util
import re
from functools import cache
from typing import Any

import typer
from typer.core import TyperGroup

from infra.cli.bench import BENCHMARKS
from infra.cli.main import app
from tests.support.pages import ROOT

SHARED_STACK = {
    r"make up|tailrace up( .*)?": "would start what the fixture has started",
    r"make down|tailrace down": "would stop what the other tests still need",
}
"""Lines that run only on a page with its own stack."""
EXEMPT = {
    r"make (test|test-unit|test-grids|test-compose|lint|format)( .*)?": "is what runs this test, or runs beside it",
    r"make lock": "resolves every dependency from the network",
    r"make bench|tailrace bench (serve|freshness)": "loads the stack for minutes; its results are on file",
    r"tailrace pipeline|tailrace pipeline --no-live-log": "trains for minutes; the fixture has run it",
    r"tailrace (promote|rollback)( .*)?": (
        "would change the bundle under the other tests; tests/unit/infra/cli/test_main.py runs it"
    ),
    r"source \.venv/bin/activate": "the tests have their programs on the path already",
    r"python -m infra\.(slo|openapi)": "would write into the repository; `--check` is run",
    r"git clone .*|cd tailrace": "the tests run in a clone already",
    r"(pip|apt-get|sudo) .*": "installs on the machine",
}
"""Lines (in full, as patterns) that are checked but not run, with the reason."""

_CALL = re.compile(r"\s*(?:\w+=\S*\s+)*(tailrace|make|python3?)\s+(.*)")
_PATH = re.compile(r"(?<![\w./$:-])(?:\./)?(\w[\w.-]*)/([\w.-]+(?:/[\w.-]+)*)")


def runnable(text: str, *, has_own_stack: bool = False) -> str:
    """Return a block without the lines that a test cannot run alongside others.

    A page with its own stack keeps the lines that start and stop it.
    """
    exempt = tuple(EXEMPT) if has_own_stack else (*SHARED_STACK, *EXEMPT)
    return "".join(line for line in text.splitlines(keepends=True) if not _is_exempt(line, exempt))


def _is_exempt(line: str, exempt: tuple[str, ...]) -> bool:
    command = re.sub(r"(^|\s)#.*", "", line).strip()
    return any(re.fullmatch(pattern, command) for pattern in exempt)


def complaints(text: str) -> list[str]:
    """Return a complaint for each named command, option, make target, module or file that does not exist."""
    text = re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "))
    errors: list[str] = []
    for command in re.split(r"[|&;()\n]", text):
        if call := _CALL.match(command):
            arguments = call[2].split()
            match call[1]:
                case "tailrace":
                    errors += _tailrace(arguments)
                case "make":
                    errors += [f"no make target {word}" for word in arguments if not _is_target(word)]
                case _ if arguments[:1] == ["-m"] and not _is_module(arguments[1]):
                    errors.append(f"no module {arguments[1]}")
                case _ if arguments[:1] == ["-m"] and re.fullmatch(r"benchmarks\.\w+", arguments[1]):
                    errors += _benchmark(arguments[1].removeprefix("benchmarks."), arguments[2:])
    paths = [f"{folder}/{rest}" for folder, rest in _PATH.findall(text) if (ROOT / folder).is_dir()]
    return errors + [f"no file {path}" for path in paths if not (ROOT / path).exists()]


def _tailrace(arguments: list[str]) -> list[str]:
    command = _program()
    rest = list(arguments)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return [f"tailrace has no {rest[0]}"]
        command, rest = command.commands[rest[0]], rest[1:]
    if command.context_settings.get("ignore_unknown_options"):  # it takes a benchmark's options
        return _benchmark(*(("faults", rest) if command.name == "chaos" else ("".join(rest[:1]), rest[1:])))
    options = {"--help", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}
    given = [word.partition("=")[0] for word in rest if word.startswith("-") and word != "--"]
    required = [option.opts for option in command.params if option.required and option.param_type_name == "option"]
    absent = [names[0] for names in required if given and not {*names} & {*given}]  # without any, it is only a name
    return [
        *(f"tailrace {command.name} has no {name}" for name in given if name.startswith("--") and name not in options),
        *(f"tailrace {command.name} needs {name}" for name in absent),
    ]


def _benchmark(name: str, arguments: list[str]) -> list[str]:
    """Return the options that neither this benchmark's parsers nor the shared ones define."""
    if name not in BENCHMARKS:
        return [f"tailrace bench has no {name}"] if name not in {"", "NAME"} else []
    files = [*(ROOT / "benchmarks" / name).glob("*.py"), ROOT / f"benchmarks/{name}.py"]
    files += (ROOT / "benchmarks/load").glob("*.py")
    source = "".join(file.read_text() for file in files if file.exists())
    known = {"--help", *re.findall(r'"(--[\w-]+)"', source)}
    known |= {f"--{field.replace('_', '-')}" for field in re.findall(r"^    (\w+): Annotated\[", source, re.MULTILINE)}
    given = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    return [f"benchmarks.{name} has no {option}" for option in given if option not in known]


@cache
def _program() -> Any:
    return typer.main.get_command(app)


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _is_target(word: str) -> bool:
    return word.startswith("-") or "=" in word or word in _targets()


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
