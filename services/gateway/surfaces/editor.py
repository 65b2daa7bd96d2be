"""Edits the file of the surfaces: reads it, refuses what would not come into force, and replaces it whole, so that a reader finds one text or the other.

Two edits do not overwrite each other: who saves names the SHA-256 of the text that was edited, and is refused where the file holds another one by
then. Where there is no file, or it cannot be written, the draft can still be checked and tried.
"""

import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from models.files import rename_durably
from services.contracts.plain import nearest, read_number
from services.contracts.recommend import check_id
from services.contracts.rules import MAX_FACTOR, MIN_FACTOR
from services.errors import InvalidRequest
from services.gateway.surfaces.surfaces import Surfaces

MAX_TEXT_BYTES = 131_072
_NO_FILE = "no file of surfaces is set up"
_SET_ONE_UP = "set TAILRACE_SURFACES_FILE and restart the gateways"
_EDIT_ELSEWHERE = "change it where this deployment keeps its configuration"


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfacesText:
    """The file as it is now. `problem` says what is wrong with it, `read_only` why it cannot be saved; None: nothing."""

    text: str
    sha256: str
    names: tuple[str, ...]
    problem: str | None
    read_only: str | None


class SurfacesEditor:
    """Reads and replaces the file of `surfaces`. Everything here blocks for some milliseconds."""

    def __init__(self, surfaces: Surfaces) -> None:
        self._surfaces = surfaces

    def read(self) -> SurfacesText:
        """Return the file's text; an empty one where there is no file."""
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
        """Replace the file, where its text still has this SHA-256, and return it; it is in force here at once and in other gateways within a second.

        Raises InvalidRequest for a text that would not come into force, a file that has changed, and one that cannot be written; nothing is changed then.
        """
        path = self._surfaces.path
        if path is None:
            raise InvalidRequest("text", _NO_FILE, _SET_ONE_UP)
        self._surfaces.read_draft(text)
        target = path.resolve()  # a link goes on leading to the file
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
        """Return a text in which the surface weighs an item by this factor, beside the rules that it has; 1 takes the item's weight away.

        All but its boosts stays as it is written, comments too. Raises InvalidRequest.
        """
        check_id("item_id", item_id)
        read_number("factor", factor, MIN_FACTOR, MAX_FACTOR)
        drafted = self._surfaces.read_draft(text)
        if surface not in drafted:
            raise InvalidRequest("surface", f"unknown surface {surface!r:.100}", nearest(surface, drafted))
        where = {"key": "item_id", "eq": item_id}
        try:
            document = tomlkit.parse(text)
            rules = document[surface].setdefault("rules", tomlkit.table())
            others = [one for one in rules.unwrap().get("boosts", ()) if one["where"] != where]
            boosts = tomlkit.array().multiline(multiline=True)
            for one in [*others, *([] if factor == 1 else [{"where": where, "factor": factor}])]:
                boosts.append(_inline(one))
            rules["boosts"] = boosts
            changed = tomlkit.dumps(document)
        except TOMLKitError as error:
            raise InvalidRequest(
                "text", f"written in a way that cannot be added to ({error})", "add the boost by hand"
            ) from error
        self._surfaces.read_draft(changed)
        return changed


def _inline(fields: Mapping[str, Any]) -> tomlkit.items.InlineTable:
    table = tomlkit.inline_table()
    for name, value in fields.items():
        table.append(name, _inline(value) if isinstance(value, Mapping) else value)
    return table


def _replace(target: Path, content: bytes) -> None:
    """Write a file beside the target, with its rights, and rename it."""
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_bytes(content)
        if target.exists():
            scratch.chmod(stat.S_IMODE(target.stat().st_mode))
        rename_durably(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other gateways from replacing files of this folder meanwhile; a lock of the folder itself leaves no file behind."""
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
    """Return the file's bytes; none where it is gone or cannot be read, which its state says."""
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
