"""The console's routes for names and releases. All need the scope admin and refuse calls from other sites' pages.

    GET  /console/names                                  each name's live version, release with the last analysis
                                                         result, and history; the published versions
    POST /console/names/NAME:rollback                    {"seen": LIVE, "to": null, "reason": ""}:
                                                         restores the previous version, or `to`, and withdraws LIVE
    POST /console/names/NAME/versions/VERSION:promote    {"seen": LIVE}: promotes the version
    POST /console/names/NAME/versions/VERSION:release    {"stages": [{"share": 0.05, "hold_s": 3600.0}],
                                                         "by_hand": false}:
                                                         releases the version to a traffic fraction
    POST /console/names/NAME/versions/VERSION:stage      {"seen": ID, "stage": 1}: moves its release to
                                                         this stage, from 0
    POST /console/names/NAME/versions/VERSION:stop       {"seen": ID, "withdraw": false, "reason": ""}: ends its release

`seen` is the live version, or the id of the release, on the page: a move from any other state is rejected. Each move
writes an audit line with name and version. Holds no rule: the bundle store decides which moves are allowed.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from models.registry.canary import Canary, CanaryStage
from models.registry.name_record import NameRecord
from models.registry.release_report import ReleaseReport
from models.registry.store import BundleStore
from services.contracts.access import Scope
from services.errors import BundleError, InvalidRequest, NotFound, StoreUnavailable
from services.gateway.call.headers import Call
from services.gateway.call.http import HttpApp, json_response, read_message
from services.gateway.console.door import console_operation
from services.gateway.console.messages import Promotion, Release, ReleaseMove, ReleaseStop, Rollback

_MAX_BODY_BYTES = 4_096


def add_releases(app: HttpApp, store: BundleStore, lead_s: float, wall_clock: Callable[[], float]) -> None:
    """Add the routes to the app.

    A stage begins `lead_s` after its record is written, so that all processes can load the version before.
    """
    door = _ReleaseDoor(store, lead_s, wall_clock)
    of_version = "/console/names/{name}/versions/{version}"
    for method, path, handler in (
        ("GET", "/console/names", door.names),
        ("POST", "/console/names/{name}:rollback", door.roll_back),
        ("POST", f"{of_version}:promote", door.promote),
        ("POST", f"{of_version}:release", door.release),
        ("POST", f"{of_version}:stage", door.move),
        ("POST", f"{of_version}:stop", door.stop),
    ):
        app.serve(console_operation(method, path, Scope.ADMIN, is_audited=method != "GET"), handler)


class _ReleaseDoor:
    """The handlers of the operations."""

    def __init__(self, store: BundleStore, lead_s: float, wall_clock: Callable[[], float]) -> None:
        self._store = store
        self._lead_s = lead_s
        self._wall_clock = wall_clock

    async def names(self, _: Request, __: Call) -> Response:
        return json_response(await asyncio.to_thread(self._describe))

    async def promote(self, http: Request, call: Call) -> Response:
        sent = await read_message(http, Promotion, _MAX_BODY_BYTES)
        version = http.path_params["version"]
        return await self._move(http, lambda store: store.promote(version, sent.seen, by=_by(call)))

    async def roll_back(self, http: Request, call: Call) -> Response:
        sent = await read_message(http, Rollback, _MAX_BODY_BYTES)

        def move(store: BundleStore) -> None:
            if (live := store.live_version()) != sent.seen:
                raise InvalidRequest("seen", f"{live} is live, and no longer {sent.seen}", "look again")
            store.rollback(sent.to, by=_by(call), reason=sent.reason)

        return await self._move(http, move)

    async def release(self, http: Request, call: Call) -> Response:
        sent = await read_message(http, Release, _MAX_BODY_BYTES)
        stages = [CanaryStage(stage.share, stage.hold_s) for stage in sent.stages]
        version, (_, since_ms) = http.path_params["version"], self._times_ms()
        return await self._move(
            http, lambda store: store.release(version, stages, since_ms, by=_by(call), by_hand=sent.by_hand)
        )

    async def move(self, http: Request, call: Call) -> Response:
        sent = await read_message(http, ReleaseMove, _MAX_BODY_BYTES)
        version, (now_ms, since_ms) = http.path_params["version"], self._times_ms()

        def move(store: BundleStore) -> None:
            release = _seen(store, version, sent.seen)
            store.move_canary(version, sent.stage, since_ms, now_ms, by=_by(call), release=release)

        return await self._move(http, move)

    async def stop(self, http: Request, call: Call) -> Response:
        sent = await read_message(http, ReleaseStop, _MAX_BODY_BYTES)
        version = http.path_params["version"]

        def move(store: BundleStore) -> None:
            release = _seen(store, version, sent.seen)
            if sent.withdraw:
                store.withdraw(version, by=_by(call), reason=sent.reason, release=release)
            else:
                store.end_canary(version, by=_by(call), note=sent.reason, release=release)

        return await self._move(http, move)

    async def _move(self, http: Request, move: Callable[[BundleStore], object]) -> Response:
        """Move a name, and return the resulting state of all names."""
        await asyncio.to_thread(self._moved, http.path_params["name"], move)
        return json_response(await asyncio.to_thread(self._describe))

    def _moved(self, name: str, move: Callable[[BundleStore], object]) -> None:
        with _in_words(name):
            names = self._store.names()
            if name not in names:
                raise NotFound(f"there is no name {name!r:.100}", f"the names are {', '.join(names) or 'none yet'}")
            move(self._store.named(name))

    def _describe(self) -> dict[str, Any]:
        with _in_words("names"):
            records = {name: self._store.named(name).record() for name in self._store.names()}
            versions = self._store.versions()
        now_ms = self._wall_clock() * 1_000
        names = [describe_name(name, record, now_ms) for name, record in records.items()]
        return {"names": names, "versions": versions[::-1]}

    def _times_ms(self) -> tuple[int, int]:
        """Return the time, and when a stage begins that is recorded now (Unix ms)."""
        now_s = self._wall_clock()
        return round(now_s * 1_000), round((now_s + self._lead_s) * 1_000)


def describe_name(name: str, record: NameRecord, now_ms: float) -> dict[str, Any]:
    """Return a name's record as plain values, the newest move and withdrawal first."""
    return {
        "name": name,
        "live": record.live,
        "previous": record.previous,
        "owner": record.owner,
        "reference": None if record.reference is None else record.reference.version,
        "canary": None if record.canary is None else _canary(record.canary, now_ms),
        "history": [asdict(move) for move in reversed(record.history)],
        "withdrawn": [
            {"version": withdrawal.version, "by": withdrawal.by, "at": withdrawal.at, "reason": withdrawal.reason}
            for withdrawal in reversed([*record.withdrawn.values()])
        ],
    }


def _canary(canary: Canary, now_ms: float) -> dict[str, Any]:
    """Return a release as plain values. `verdict` is the last analysis report, None before the first."""
    report = ReleaseReport.decode(canary.report)
    return {
        "id": _release_id(canary),
        "version": canary.version,
        "stages": [asdict(stage) for stage in canary.stages],
        "stage": canary.stage,
        "since_ms": canary.since_ms,
        "share": canary.share_at(now_ms),
        "by": canary.by,
        "at": canary.at,
        "by_hand": canary.by_hand,
        "budgets": dict(canary.budgets),
        "verdict": None if report is None else asdict(report),
        "looked_ms": canary.looked_ms,
    }


def _seen(store: BundleStore, version: str, seen: str) -> Canary:
    """Return the release in progress, which the caller's page shows. Raises InvalidRequest."""
    canary = store.record().canary
    if canary is None or canary.version != version:
        raise InvalidRequest("seen", f"no release of {version} is in progress", "reload the names")
    if _release_id(canary) != seen:
        raise InvalidRequest("seen", f"the release of {version} has changed since", "reload the names")
    return canary


def _release_id(canary: Canary) -> str:
    """Return the id of a release in its stage: another stage, or another release of the version, has another id."""
    return hashlib.blake2b(repr(canary.identity).encode(), digest_size=8).hexdigest()


def _by(call: Call) -> str:
    return f"{call.admitted.key_id} (console)"


@contextmanager
def _in_words(field: str) -> Iterator[None]:
    """Convert the store's refusals to errors that the caller may see: callers here are operators.

    Raises InvalidRequest or StoreUnavailable.
    """
    try:
        yield
    except StoreUnavailable:
        raise
    except BundleError as error:
        problem, _, fix = str(error).partition("; ")
        raise InvalidRequest(field, problem, fix or "look at the names again") from error
