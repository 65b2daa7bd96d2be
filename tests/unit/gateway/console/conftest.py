"""The complete console with page, editor and releases, on fakes."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.registry.store import BundleStore
from services.contracts.access import Scope
from services.gateway.console.door import add_console
from services.gateway.console.editor import add_editor
from services.gateway.console.releases import add_releases
from services.gateway.console.samples import MetricSampler
from services.gateway.console.service import ConsoleService
from services.gateway.console.slo import series_for
from services.gateway.drills import DrilledStore, Drills
from services.gateway.rest.door import create_rest_app
from services.observability.objectives import load_objectives
from tests.support.gateway.keys import stored_key
from tests.unit.gateway.clients import in_process
from tests.unit.gateway.test_drills import FakeStore
from tests.unit.gateway.world import MAX_BODY_BYTES, NOW_S, VERSION, World, keyed_access, started_world

CART = "[cart]\nk = 4\ntiers = ['student']\n"
NEXT = "v2"
LEAD_S = 10.0
TIMES = {1: 11, 2: 22, 3: 33}
NO_GAIN = {"num_cases": 40, "llm_minus_student": -0.01, "low": -0.02, "high": 0.01}
GAIN = {"num_cases": 50, "llm_minus_student": 0.02, "low": 0.01, "high": 0.03}
REPORT = {
    "dataset": "toy",
    "num_test_users": 3,
    "student_share": 0.98,
    "metrics": {
        "decoder": {"hr@10": 0.5, "ndcg@10": 0.25, "ndcg@10_interval": [0.2, 0.3]},
        "popularity": {"hr@10": 0.1, "ndcg@10": 0.05},
    },
    "gain": [
        {"slice": "all", "history": None, **GAIN},
        {"slice": "history 0-9", "history": [0, 9], **NO_GAIN},
        {"slice": "history 10 and longer", "history": [10, None], **GAIN},
    ],
}


class ScannedStore(FakeStore):
    """A store whose scan returns each key twice, as Redis may."""

    async def sample_user_ids(self, limit: int, timeout_s: float) -> list[str]:
        return 2 * await super().sample_user_ids(limit, timeout_s)


@dataclass
class Console:
    """A console with a file of one surface and a second bundle version.

    `http` calls it without keys; `keyed` has the keys `reader` (scope recommend), `admin`, and `others` (every other
    scope).
    """

    world: World
    http: httpx.AsyncClient
    keyed: httpx.AsyncClient
    surfaces: Path
    store: BundleStore
    drills: Drills
    sampler: MetricSampler

    async def send(self, method: str, path: str, **body: Any) -> Any:
        """Return the JSON of a successful answer."""
        answer = await self._call(method, path, body)
        assert answer.is_success, answer.text
        return answer.json()

    async def refused(self, method: str, path: str, **body: Any) -> Any:
        """Return the error of a rejected call."""
        answer = await self._call(method, path, body)
        error = answer.json()["error"]
        assert answer.status_code == {"invalid_request": 422, "not_found": 404}[error["code"]]
        return error

    async def _call(self, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
        """Call without keys; answers must forbid storing, since histories are personal, and type sniffing."""
        answer = await self.http.request(method, path, json=body or None)
        assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == ("no-store", "nosniff")
        return answer

    async def item_ids(self, **fields: Any) -> list[str]:
        return [item.item_id for item in (await self.world.recommend("long", **fields)).items]


@pytest.fixture
async def console(tmp_path: Path) -> AsyncIterator[Console]:
    """The console's routes in an open app and in an app with keys."""
    surfaces = tmp_path / "surfaces" / "surfaces.toml"
    surfaces.parent.mkdir()
    surfaces.write_text(CART)
    scopes = {"reader": [Scope.RECOMMEND], "admin": [Scope.ADMIN], "others": [*set(Scope) - {Scope.ADMIN}]}
    access = keyed_access(tmp_path, *(stored_key(name, *held) for name, held in scopes.items()))
    async with started_world(tmp_path, surfaces_file=surfaces) as world:
        store = BundleStore(tmp_path / "bundles")
        store.publish(store.open(VERSION).path, NEXT, {"dataset": "toy"})
        objectives, drills = load_objectives(), Drills(tmp_path / "drills.json")
        sampler = MetricSampler(world.registry.collect, series_for(objectives))
        service = ConsoleService(
            live=world.plane.names.first,
            users=DrilledStore(ScannedStore(world.features.users), drills),
            event_times=lambda _: TIMES,
            sampler=sampler,
            scrape=world.registry.collect,
            drills=drills,
            objectives=objectives,
            read_report=lambda _: REPORT,
            default_deadline_ms=200,
            llm_needs_gain=True,
        )
        apps = [
            create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, access=door_access)
            for door_access in (None, access)
        ]
        for app in apps:
            add_console(app, service)
            add_editor(app, lambda: world.plane)
            add_releases(app, store, LEAD_S, lambda: NOW_S)
        async with in_process(apps[0]) as http, in_process(apps[1]) as keyed:
            yield Console(world, http, keyed, surfaces, store, drills, sampler)
