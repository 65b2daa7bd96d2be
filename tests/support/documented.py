"""Check the commands of a page: which programs exist, and which lines a test must leave out and why."""

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer
from typer.core import TyperGroup

from services.cli.main import app
from tests.support.pages import ROOT
from tests.support.shell_words import Command, commands, logical_lines

_TOOLS = """
apt-get awk bash basename cat cd chmod cp curl cut date df diff dirname du echo env export false find free git grep head id
install jq kill ls mkdir mktemp mv nproc openssl pip printf promtool ps pytest read rm sed seq set sha256sum sleep sort source
ss stat sudo tail tar tee test top touch tr true trap uniq unset uptime wait watch wc xargs
"""
_DOCKER = """
build compose cp exec image images inspect kill load logs network ps pull push restart rm run save start stats stop system
tag top volume buildx version info
"""
_KUBECTL = """
annotate apply auth config cordon cp create delete describe diff drain edit events exec explain expose get kustomize label
logs patch port-forward rollout run scale set top uncordon version wait
"""
EXEMPT = {
    r"make up|tailrace up( .*)?": "would start what the fixture has started",
    r"make down|tailrace down": "would stop what the other tests still need",
    r"make (test|test-unit|test-grids|test-compose|lint|format)( .*)?": "is what runs this test, or runs beside it",
    r"make lock": "resolves every dependency from the network",
    r"make bench|tailrace bench": "loads the stack for minutes; its results are on file",
    r"tailrace pipeline|tailrace pipeline --no-live-log": "trains for minutes; the fixture has run it",
    r"tailrace (promote .*|rollback)": "would change the bundle under the other tests; tests/unit/cli/test_main.py runs it",
    r"source \.venv/bin/activate": "the tests have their programs on the path already",
    r"python -m infra\.(slo|api_page)": "would write into the repository; `--check` is run",
    r"git clone .*|cd tailrace": "the tests run in a clone already",
    r"(pip|apt-get|sudo) .*": "installs on the machine",
}
"""Commands (in full, as patterns) that are only checked where others run, with the reason."""

TOOLS = frozenset(_TOOLS.split())
DOCKER = frozenset(_DOCKER.split())
KUBECTL = frozenset(_KUBECTL.split())
CLUSTER_TOOLS = {"helm", "kind", "minikube"}
RAY = {"ray", "serve"}
"""Ray's own programs, which come with it."""
GUESTS = {"aiperf", "guidellm"}
"""Programs that pages name and the project does not install."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The lines of a block that run, and those left out with their reasons."""

    script: str
    left_out: tuple[tuple[str, str], ...]


def runnable(text: str) -> Shared:
    """Leave out the lines of a block that a test cannot run beside others."""
    kept, left_out = [], []
    for line in logical_lines(text):
        reasons = [reason for command in commands(line) if (reason := reason_to_skip(command))]
        if reasons:
            left_out.append((line.strip(), reasons[0]))
        else:
            kept.append(line)
    return Shared("".join(kept), tuple(left_out))


def reason_to_skip(command: Command) -> str | None:
    """Return why a test leaves this command out; None when it runs."""
    words = " ".join(command.words)
    return next((reason for pattern, reason in EXEMPT.items() if re.fullmatch(pattern, words)), None)


def complaints(command: Command) -> list[str]:
    """Return what is wrong with a command: a program, subcommand, option or file that does not exist."""
    program, *arguments = command.words
    match program:
        case "tailrace":
            found = _tailrace(arguments)
        case "make":
            found = [
                f"no make target {word}" for word in _plain(arguments) if "=" not in word and word not in _targets()
            ]
        case "python" | "python3":
            found = _python(arguments)
        case "docker":
            found = [] if not (verb := _plain(arguments)[:1]) or verb[0] in DOCKER else [f"docker has no {verb[0]}"]
        case "kubectl":
            found = _kubectl(arguments)
        case _:
            known = (
                program in TOOLS | CLUSTER_TOOLS | RAY | GUESTS
                or program.startswith(("./", "$"))
                or (ROOT / program).is_file()
            )
            found = [] if known else [f"unknown program {program}"]
    return found + [
        f"no file {word}" for word in map(_value, arguments) if _is_of_the_repository(word) and not _exists(word)
    ]


def _tailrace(arguments: list[str]) -> list[str]:
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return [f"tailrace has no {rest[0]}"]
        command, rest = command.commands[rest[0]], rest[1:]
    options = {"--help", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}
    given = [word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"]
    return [f"tailrace {command.name} has no {option}" for option in given if option not in options]


def _python(arguments: list[str]) -> list[str]:
    if arguments[:1] == ["-m"]:
        try:
            found = importlib.util.find_spec(arguments[1])
        except ModuleNotFoundError:
            found = None
        return [] if found else [f"no module {arguments[1]}"]
    return []


def _kubectl(arguments: list[str]) -> list[str]:
    words = list(arguments)
    while words and words[0].startswith("-"):
        words = words[1:] if "=" in words[0] else words[2:]
    return [] if not words or words[0] in KUBECTL else [f"kubectl has no {words[0]}"]


def _plain(arguments: list[str]) -> list[str]:
    return [word for word in arguments if not word.startswith("-")]


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _value(word: str) -> str:
    return word.partition("=")[2] if word.startswith("-") else word


def _is_of_the_repository(word: str) -> bool:
    """Whether a word is a path into a folder of the repository, with nothing for the shell to fill in."""
    return (
        bool(re.fullmatch(r"(\./)?\w[\w.-]*/[\w./-]*", word))
        and (ROOT / word.removeprefix("./").split("/")[0]).is_dir()
    )


def _exists(word: str) -> bool:
    return (ROOT / word).exists()
