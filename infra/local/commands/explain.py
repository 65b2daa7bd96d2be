"""`tailrace explain`: get a request's explanation from the REST door, and print it with its stages on a time line.

The gateway writes the explanation; this only formats it.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.contracts.access import Scope
from services.errors import ConfigError, EnvironmentFault, NotFound

_TIMEOUT_S = 5.0
_BAR_CELLS = 40
_WELL = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """REST address, API key, certificate authority to trust, and the REST address of this machine's stack."""

    url: str
    key: str | None = None
    ca_file: Path | None = None
    local_url: str = ""

    @property
    def hint(self) -> str:
        """Return what to try if no gateway answers."""
        if self.local_url and self.url.rstrip("/") != self.local_url:
            return f"the REST address of this machine's stack is {self.local_url}"
        return "is the stack up? `tailrace status`"


def ask(door: Door, request_id: str) -> dict[str, Any]:
    """Return the explanation. Raises NotFound, ConfigError, or EnvironmentFault without an answer or if refused."""
    headers = {"authorization": f"Bearer {door.key}"} if door.key else {}
    path = f"/v1/explanations/{quote(request_id, safe='')}"
    try:
        with httpx.Client(
            base_url=door.url, headers=headers, verify=_trust(door.ca_file), timeout=_TIMEOUT_S
        ) as client:
            answer = client.get(path)
    except httpx.HTTPError as error:
        raise EnvironmentFault(f"no gateway answers at {door.url} ({error}); {door.hint}") from error
    body = _json(answer)
    if answer.status_code == httpx.codes.OK and "sentences" in body:
        return body
    raise _refusal(answer, body.get("error"), door.hint)


def _trust(ca_file: Path | None) -> ssl.SSLContext | bool:
    try:
        return True if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"--ca-file: {ca_file} holds no certificate ({error.strerror}); give a PEM file") from error


def show(explanation: dict[str, Any], out: Console) -> None:
    """Print the sentences, then the stages."""
    first, *others = explanation["sentences"]
    is_late = (explanation["elapsed_ms"] or 0.0) > (explanation["deadline_ms"] or float("inf"))
    colour = "red" if explanation["outcome"] != _WELL else "yellow" if is_late else "green"
    out.print(f"[bold {colour}]{escape(first)}[/]")
    for sentence in others:
        out.print(escape(sentence))
    if explanation["stages"]:
        out.print()
        out.print(timeline(explanation))
    if explanation["trace_id"]:
        out.print(f"\ntrace {explanation['trace_id']}")


def timeline(explanation: dict[str, Any]) -> Table:
    """Return a table of the stages over the request's time; stages may overlap."""
    table = Table("stage", "ms", "", box=None, pad_edge=False)
    whole_ms = max(explanation["elapsed_ms"], 1e-3)
    for stage in explanation["stages"]:
        cells = bar(stage["offset_ms"] / whole_ms, stage["duration_ms"] / whole_ms)
        table.add_row(stage["name"], f"{stage['duration_ms']:.2f}", f"[cyan]{cells}[/]")
    table.add_row("whole", f"{explanation['elapsed_ms']:.2f}", "[dim]" + "─" * _BAR_CELLS + "[/]")
    return table


def bar(begin: float, length: float) -> str:
    """Return a bar of this start and length, as fractions of the whole (0 to 1), at least one cell long."""
    first = min(_BAR_CELLS - 1, int(begin * _BAR_CELLS))
    count = max(1, min(_BAR_CELLS - first, round(length * _BAR_CELLS)))
    return " " * first + "█" * count


def _json(answer: httpx.Response) -> dict[str, Any]:
    """Return the answer's JSON object, empty for anything else."""
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _refusal(answer: httpx.Response, error: Any, hint: str) -> Exception:
    """Return the error for the gateway's refusal, in one line."""
    if not isinstance(error, dict):
        return EnvironmentFault(f"{answer.url} is not a Tailrace gateway: status {answer.status_code}; {hint}")
    if answer.status_code == httpx.codes.NOT_FOUND:
        return NotFound(error["message"], error["fix"])
    if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        return EnvironmentFault(f"{error['message']}; give one with the scope {Scope.ADMIN} by --key-file or --key")
    return EnvironmentFault(f"the gateway refused: {error['message']}")
