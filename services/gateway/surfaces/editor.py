"""Edits the surfaces file: reads it, rejects invalid edits, and replaces it atomically.

Concurrent edits do not overwrite each other: a save names the SHA-256 of the text that was edited, and is rejected if
the file has changed. Without a file, or with a read-only one, drafts can still be checked and tried.
"""

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from models.files import write_durably
from services.contracts.message import check_id
from services.contracts.nearest import nearest
from services.contracts.rules import MAX_FACTOR, MIN_FACTOR
from services.errors import InvalidRequest
from services.gateway.surfaces.surface import parse_surface
from services.gateway.surfaces.surfaces import Surfaces

MAX_TEXT_BYTES = 131_072
FORM_FIELDS, FORM_RULES = ("k", "deadline_ms", "tiers"), ("boosts", "pins", "blocks", "caps")
"""Surface fields and rules shown in the form; all else is edited as text."""
_NO_FILE = "no file of surfaces is set up"
_SET_ONE_UP = "set TAILRACE_SURFACES_FILE and restart the gateways"
_EDIT_ELSEWHERE = "change it where this deployment keeps its configuration"


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfacesText:
    """The current file.

    `problem` describes its error and `read_only` why it cannot be saved; None if not applicable.
    """

    text: str
    sha256: str
    names: tuple[str, ...]
    problem: str | None
    read_only: str | None


class SurfacesEditor:
    """Reads and replaces the file of `surfaces`. All methods block for a few milliseconds."""

    def __init__(self, surfaces: Surfaces) -> None:
        self._surfaces = surfaces

    def read(self) -> SurfacesText:
        """Return the file's text; empty without a file."""
        path, problem, names = self._surfaces.path, None, tuple[str, ...]()
        content = b"" if path is None else _content(path)
        try:
            names = tuple(self._surfaces.read_draft(_decoded(content)))
        except InvalidRequest as error:
            problem = error.summary
        return SurfacesText(
            text=content.decode(errors="replace"),
            sha256=_sha256(content),
            names=names,
            problem=problem,
            read_only=f"{_NO_FILE}; {_SET_ONE_UP}" if path is None else _why_read_only(path),
        )

    def save(self, text: str, sha256: str) -> SurfacesText:
        """Replace the file if its text still has this SHA-256; return the new state.

        In force here at once and in other gateways within a second. Raises InvalidRequest, without changes, for an
        invalid text, a file that has changed, and a file that cannot be written.
        """
        path = self._surfaces.path
        if path is None:
            raise InvalidRequest("text", _NO_FILE, _SET_ONE_UP)
        self._surfaces.read_draft(text)
        target = path.resolve()  # replace the target of a symbolic link, not the link
        try:
            with _locked(target.parent):
                if _sha256(_content(target)) != sha256:
                    raise InvalidRequest(
                        "sha256", "the file has changed meanwhile", "read it again and repeat the edit"
                    )
                if (why := _why_read_only(target)) is not None:
                    raise InvalidRequest("text", why, _EDIT_ELSEWHERE)
                _replace(target, text.encode())
        except OSError as error:
            raise InvalidRequest("text", f"the file cannot be written ({error.strerror})", _EDIT_ELSEWHERE) from error
        self._surfaces.refresh()
        return self.read()

    def boosted(self, text: str, surface: str, item_id: str, factor: float) -> str:
        """Return the text with the surface's boost for this item set to `factor`; 1 removes the boost.

        Keeps its other rules, and the text outside its boosts with comments. Raises InvalidRequest.
        """
        check_id("item_id", item_id)
        if not MIN_FACTOR <= factor <= MAX_FACTOR:
            raise InvalidRequest("factor", f"{factor:g} is out of range", f"send {MIN_FACTOR:g} to {MAX_FACTOR:g}")
        drafted = self._surfaces.read_draft(text)
        if surface not in drafted:
            raise InvalidRequest("surface", f"unknown surface {surface!r:.100}", nearest(surface, drafted))
        where = {"key": "item_id", "eq": item_id}
        others = [boost for boost in self.fields(text, surface)["boosts"] or () if boost["where"] != where]
        return self.with_fields(
            text, surface, {"boosts": [*others, *([] if factor == 1 else [{"where": where, "factor": factor}])]}
        )

    def fields(self, text: str, surface: str) -> dict[str, Any]:
        """Return the form fields of a surface of this text as plain values, None if unset.

        Raises InvalidRequest for an invalid text.
        """
        self._surfaces.read_draft(text)
        plain = tomlkit.parse(text).unwrap().get(surface, {})
        rules = plain.get("rules", {})
        return {name: (rules if name in FORM_RULES else plain).get(name) for name in (*FORM_FIELDS, *FORM_RULES)}

    def with_fields(self, text: str, surface: str, fields: Mapping[str, Any]) -> str:
        """Return the text with these form fields set on the surface, which is added if new.

        None or an empty list removes a field. All other text is kept, comments included. Raises InvalidRequest for an
        unknown form field, and for an invalid result.
        """
        check_id("surface", surface)
        before = self.fields(text, surface)
        for name in fields:
            if name not in before:
                raise InvalidRequest(f"fields.{name}", "no field of the form", f"the fields are {', '.join(before)}")
        wanted = before | {name: None if value == [] else value for name, value in fields.items()}
        given = {name: value for name, value in wanted.items() if value is not None}
        rules = {name: given.pop(name) for name in FORM_RULES if name in given}
        parse_surface(
            surface, {**given, "rules": rules}
        )  # before tomlkit, which would recurse into values of any depth
        try:
            document = tomlkit.parse(text)
            table = document.setdefault(surface, tomlkit.table())
            for name, value in wanted.items():
                if value != before[name]:
                    _set(table.setdefault("rules", tomlkit.table()) if name in FORM_RULES else table, name, value)
            changed = tomlkit.dumps(document)
            if surface not in tomlkit.parse(changed):  # `cart.k = 4` on its own: the surface goes with its last field
                document[surface] = tomlkit.table()
                changed = tomlkit.dumps(document)
        except (TOMLKitError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise InvalidRequest(
                "text", f"written in a way that cannot be added to ({error})", "make the change by hand"
            ) from error
        if _beside_form(changed, surface) != _beside_form(text, surface) or self.fields(changed, surface) != wanted:
            raise InvalidRequest("text", "written in a way that cannot be added to", "make the change by hand")
        return changed


def _beside_form(text: str, surface: str) -> tuple[dict[str, Any], ...]:
    """Return the values of a text outside this surface's form: other surfaces, other fields, other rules."""
    plain = tomlkit.parse(text).unwrap()
    own = plain.pop(surface, {})
    rules = {name: value for name, value in own.pop("rules", {}).items() if name not in FORM_RULES}
    return plain, {name: value for name, value in own.items() if name not in FORM_FIELDS}, rules


def _set(table: Any, name: str, value: Any) -> None:
    """Set a field of a TOML table; None removes it. Rules are written one per line."""
    if value is None:
        del table[name]
    elif name in FORM_RULES:
        array = tomlkit.array().multiline(multiline=True)
        for entry in value:
            array.append(_inline(entry))
        table[name] = array
    else:
        table[name] = value


def _inline(fields: Mapping[str, Any]) -> tomlkit.items.InlineTable:
    table = tomlkit.inline_table()
    for name, value in fields.items():
        table.append(name, _inline(value) if isinstance(value, Mapping) else value)
    return table


def _replace(target: Path, content: bytes) -> None:
    """Replace the file and keep its permissions."""
    write_durably(target, content, stat.S_IMODE(target.stat().st_mode) if target.exists() else None)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder itself against concurrent replacements by other gateways; this leaves no lock file behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _why_read_only(path: Path) -> str | None:
    target = path.resolve()
    if os.access(target.parent, os.W_OK) and (os.access(target, os.W_OK) or not target.exists()):
        return None
    return "the file is read-only for the gateway"


def _content(path: Path) -> bytes:
    """Return the file's bytes; empty if it is missing or unreadable, which the file state reports."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("text", "not UTF-8", "write it again") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
