"""The console's routes: the page, its headers, its API, and who may call it. `pytest tests/unit/gateway/test_console_door.py`."""

import asyncio
import fcntl
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.contracts.access import Caller, Scope
from services.errors import NotAllowed, Unauthenticated
from services.gateway.console.door import add_console
from services.gateway.console.service import ConsoleService
from services.gateway.console.slo import kept_for
from services.gateway.console.static import PAGE_DIR, load_page
from services.gateway.console.users import MAX_SHOWN, Person, choose_people, spread
from services.gateway.console.watch import Watch
from services.gateway.rest.door import create_rest_app
from services.gateway.tiers.drills import DrilledStore, Drills, Part, read_drills
from services.observability.metrics import node_registry
from services.observability.objectives import load_objectives
from tests.support.until import until
from tests.unit.gateway.test_drills import FakeStore
from tests.unit.gateway.world import MAX_BODY_BYTES, VERSION, World

REPORT = {
    "dataset": "toy",
    "num_test_users": 3,
    "student_share": 0.98,
    "metrics": {
        "decoder": {"hr@10": 0.5, "ndcg@10": 0.25, "ndcg@10_interval": [0.2, 0.3]},
        "popularity": {"hr@10": 0.1, "ndcg@10": 0.05},
    },
}
API = ["/console/live", "/console/bundle", "/console/users", "/console/history?user_id=long"]
TIMES = {1: 11, 2: 22, 3: 33}


class ByWord:
    """Access by a word: `admin` and `reader` are keys, everything else is not."""

    def authorize(self, headers: Any, scope: Scope) -> Caller:
        """Let in who may."""
        word = headers.get("authorization", "").removeprefix("Bearer ")
        scopes = {"admin": frozenset(Scope), "reader": frozenset({Scope.RECOMMEND})}.get(word)
        if scopes is None:
            raise Unauthenticated
        if scope not in scopes:
            raise NotAllowed(scope, word)
        return Caller(key_id=word, scopes=scopes)


@dataclass
class Console:
    """A console on fakes, with its two callers."""

    http: httpx.AsyncClient
    keyed: httpx.AsyncClient
    drills: Drills
    watch: Watch
    registry: CollectorRegistry


@pytest.fixture
async def console(world: World, tmp_path: Path) -> AsyncIterator[Console]:
    """Two apps around one desk: one open, one with keys."""
    objectives, drills = load_objectives(), Drills(tmp_path / "drills.json")
    watch = Watch(world.registry.collect, kept_for(objectives))
    store = FakeStore(world.features.users)
    desk = ConsoleService(
        live=world.live,
        people=DrilledStore(store, drills),
        event_times=lambda _: TIMES,
        watch=watch,
        drills=drills,
        objectives=objectives,
        read_report=lambda _: REPORT,
        default_deadline_ms=200,
    )
    clients = []
    for access in (None, ByWord()):
        app = create_rest_app(lambda: world.plane, lambda: b"", MAX_BODY_BYTES, access=access)
        add_console(app, desk)
        clients.append(httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door"))
    async with clients[0] as http, clients[1] as keyed:
        yield Console(http, keyed, drills, watch, world.registry)


async def test_the_page_is_served_with_strict_headers(console: Console) -> None:
    """No script but our own files, no frame around it, no guessing of types, no referrer."""
    answer = await console.http.get("/")

    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_every_file_comes_with_an_etag_and_is_not_sent_twice(console: Console) -> None:
    """A browser that has a file gets 304 without a body; one that has another version gets the file."""
    for name, file in load_page().items():
        first = await console.http.get(f"/console/page/{name}")
        again = await console.http.get(f"/console/page/{name}", headers={"if-none-match": f'"x", W/{file.etag}'})
        other = await console.http.get(f"/console/page/{name}", headers={"if-none-match": '"old"'})

        assert (first.status_code, first.content) == (200, file.body)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", file.etag)
        assert other.status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2fdoor.py", "../door.py", "__init__.py", ".", "index.html%00"])
async def test_nothing_else_can_be_fetched(console: Console, name: str) -> None:
    """Only the page's own files are there; the rest is not found, in the envelope."""
    answer = await console.http.get(f"/console/page/{name}")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_the_page_loads_nothing_from_elsewhere_and_inlines_nothing() -> None:
    """Every address in the page is our own; there is no inline script, style or handler, and no HTML is made from text."""
    html = (PAGE_DIR / "index.html").read_text()
    addresses = re.findall(r"""(?:src|href)="([^"]+)\"""", html)
    everything = {name: file.body.decode() for name, file in load_page().items()}
    imports = [name for text in everything.values() for name in re.findall(r'from "(.+?)"', text)]

    assert all(address.startswith(("/", "#")) and not address.startswith("//") for address in addresses)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", html)
    assert all(name.startswith("./") and name[2:] in everything for name in imports)
    for name, text in everything.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://(?!www\.w3)", text
        ), name


def test_every_file_of_the_page_is_packaged() -> None:
    """An installed package has the page: its kinds of files are named in pyproject.toml."""
    root = PAGE_DIR.parents[3]
    declared = (root / "pyproject.toml").read_text()

    assert '"services.gateway.console" = ["page/*"]' in declared
    assert {"index.html", "console.css", "main.js"} <= set(load_page())


async def test_the_docs_and_the_schema_stay_as_they_were(console: Console) -> None:
    """The console is no part of the public API."""
    docs, schema = await console.http.get("/docs"), await console.http.get("/openapi.json")

    assert docs.status_code == 200
    assert not [path for path in schema.json()["paths"] if path == "/" or path.startswith("/console")]


async def test_users_come_from_the_store(console: Console) -> None:
    """Users are those that the store holds, longest history first, with what is known of them."""
    answer = await console.http.get("/console/users")

    users = answer.json()["users"]
    assert users[0] == {"user_id": "sated", "num_events": 20, "has_stored_list": False}
    assert {"user_id": "listed", "num_events": 3, "has_stored_list": True} in users


async def test_a_history_has_titles_and_times_newest_first(console: Console) -> None:
    """The newest item has the store's own time, older ones the offline table's."""
    answer = await console.http.get("/console/history", params={"user_id": "long"})

    history = answer.json()
    assert [item["title"] for item in history["items"]] == ["Item 3", "Item 2", "Item 1", "Item 0"]
    assert [item["event_time_ms"] for item in history["items"]][1:] == [33, 22, 11]
    assert history["items"][0]["event_time_ms"] == history["newest_event_time_ms"]
    assert history["items"][0]["categories"] == ["odd"]


async def test_a_history_names_items_that_the_catalogue_lacks(console: Console) -> None:
    """An item that left the catalogue is shown by its id."""
    answer = await console.http.get("/console/history", params={"user_id": "dropouts"})

    assert [item["title"] for item in answer.json()["items"]] == ["gone3", "gone2", "gone1"]


@pytest.mark.parametrize("user_id", ["", "x" * 300, "a\nb"])
async def test_a_bad_user_id_is_refused_by_name(console: Console, user_id: str) -> None:
    """The same words as at the other routes."""
    answer = await console.http.get("/console/history", params={"user_id": user_id})

    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "user_id")


async def test_the_bundle_comes_with_its_quality_table(console: Console) -> None:
    """Models are in their order, those that the report lacks are left out."""
    answer = await console.http.get("/console/bundle")

    body = answer.json()
    assert (body["version"], body["num_items"]) == (VERSION, 20)
    assert [row["model"] for row in body["quality"]["rows"]] == ["decoder", "popularity"]
    assert body["quality"]["rows"][0]["ndcg_interval"] == [0.2, 0.3]


async def test_the_live_view_follows_what_is_answered(console: Console) -> None:
    """Between two samples the answers are counted, by tier."""
    await console.watch.sample()
    for _ in range(3):
        await console.http.post("/v1/recommendations", json={"user_id": "listed", "k": 3})
    await console.watch.sample()

    answer = await console.http.get("/console/live")

    body = answer.json()
    assert [one["num_total"] for one in body["promises"] if one["name"] == "availability"] == [3]
    assert body["moments"][-1]["rates"]["precomputed"] > 0
    assert (body["drills"], body["default_deadline_ms"]) == ({}, 200)


async def test_a_drill_shows_and_ends(console: Console) -> None:
    """Switching off is told by every later view; switching on ends it."""
    off = await console.http.post("/console/drills", json={"llm": "off", "features": "off"})
    live = await console.http.get("/console/live")
    users = await console.http.get("/console/users")
    on = await console.http.post("/console/drills", json={"llm": "on", "features": "on"})

    assert set(off.json()["drills"]) == set(live.json()["drills"]) == {"llm", "features"}
    assert (users.status_code, users.json()["error"]["code"]) == (503, "dependency_away")
    assert on.json() == {"drills": {}}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_site_switches_nothing(console: Console, site: str) -> None:
    """A browser tells where a call comes from; a form of a stranger's page is refused, whatever it says."""
    answer = await console.http.post("/console/drills", content=b'{"llm": "off"}', headers={"sec-fetch-site": site})

    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "sec-fetch-site")
    assert not console.drills.is_off(Part.LLM)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"{}", "body"),
        (b'{"moon": "off"}', "moon"),
        (b'{"llm": true}', "llm"),
        (b'{"llm": "OFF"}', "llm"),
        (b'{"llm": "off", "features": null}', "features"),
    ],
)
async def test_a_bad_drill_is_refused_and_switches_nothing(console: Console, body: bytes, field: str) -> None:
    """All or none, and the field is named."""
    answer = await console.http.post("/console/drills", content=body)

    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)
    assert not any(console.drills.is_off(part) for part in Part)


async def test_a_large_body_is_refused(console: Console) -> None:
    """A drill is a few bytes."""
    answer = await console.http.post("/console/drills", content=b"x" * 2_000)

    assert answer.status_code == 413


@pytest.mark.parametrize("path", API)
async def test_with_keys_the_page_is_open_and_its_api_is_not(console: Console, path: str) -> None:
    """The page itself holds no secret; what it reads needs a key, and people and switches need the scope admin."""
    page = await console.keyed.get("/")
    nobody = await console.keyed.get(path)
    reader = await console.keyed.get(path, headers={"authorization": "Bearer reader"})
    admin = await console.keyed.get(path, headers={"authorization": "Bearer admin"})

    may_read = path in {"/console/live", "/console/bundle"}
    assert (page.status_code, nobody.status_code, admin.status_code) == (200, 401, 200)
    assert reader.status_code == (200 if may_read else 403)


async def test_switching_needs_admin_and_is_audited(console: Console) -> None:
    """Who switches what is written down, refused tries too."""
    with capture_logs() as told:
        refused = await console.keyed.post(
            "/console/drills", json={"llm": "off"}, headers={"authorization": "Bearer reader"}
        )
        switched = await console.keyed.post(
            "/console/drills", json={"llm": "off"}, headers={"authorization": "Bearer admin"}
        )

    acts = [str(line) for line in told if line["event"] == "audit"]
    assert (refused.status_code, switched.status_code) == (403, 200)
    assert len(acts) == 2
    assert all("/console/drills" in act for act in acts)


async def test_a_switch_whose_caller_leaves_is_audited_too(console: Console, tmp_path: Path) -> None:
    """Ray Serve takes the work away from a caller who has gone; the switch was thrown by then, and somebody did it."""
    with (tmp_path / "drills.lock").open("w") as lock, capture_logs() as told:
        fcntl.flock(lock, fcntl.LOCK_EX)
        headers = {"authorization": "Bearer admin"}
        switching = asyncio.create_task(console.keyed.post("/console/drills", json={"llm": "off"}, headers=headers))
        for _ in range(10):  # threads take work in turn: after these the switch's has begun, and waits for the lock
            await asyncio.to_thread(int)
        switching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await switching
    await until(lambda: read_drills(tmp_path / "drills.json"))

    (act,) = [line for line in told if line["event"] == "audit"]
    assert (act["who"], act["outcome"]) == ("admin", "gone")


async def test_answers_of_the_api_are_not_kept_by_caches(console: Console) -> None:
    """Histories are personal: nothing between us and the browser may keep them, an error neither."""
    for path in (*API, "/console/history?user_id="):
        answer = await console.http.get(path)

        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_people_are_spread_from_long_to_short() -> None:
    """A third have a stored list where there are such; the rest are spread over the lengths, none twice."""
    found = [Person(user_id=f"u{n:03}", num_events=n, has_stored_list=n % 20 == 0) for n in range(100)]

    chosen = spread(found, 12)

    assert len(chosen) == len({person.user_id for person in chosen}) == 12
    assert [person.num_events for person in chosen] == sorted((person.num_events for person in chosen), reverse=True)
    assert sum(person.has_stored_list for person in chosen) >= 4
    assert spread(found[:3], 12) == found[:3][::-1]


async def test_nobody_is_offered_twice(world: World) -> None:
    """A scan of the store may give one key several times."""

    class Twice(FakeStore):
        """A store whose scan repeats keys."""

        async def sample_user_ids(self, limit: int, timeout_s: float) -> list[str]:
            """Return some users again."""
            return ["long", "short", "long", "listed", "short"]

    found = await choose_people(Twice(world.features.users), 12)

    assert sorted(person.user_id for person in found) == ["listed", "long", "short"]


async def test_a_long_history_is_cut(console: Console, world: World) -> None:
    """The page shows the newest ones only, and says how many there are."""
    from tests.unit.gateway.world import user

    world.features.users["busy"] = user(*(f"i{n % 20:02}" for n in range(MAX_SHOWN + 30)))

    answer = await console.http.get("/console/history", params={"user_id": "busy"})

    assert (len(answer.json()["items"]), answer.json()["num_events"]) == (MAX_SHOWN, MAX_SHOWN + 30)


async def test_a_folder_that_cannot_be_read_costs_one_sample(console: Console, tmp_path: Path) -> None:
    """The next look succeeds; nothing else breaks. A process that has just begun leaves a file empty for a moment."""
    (tmp_path / "counter_4711.db").touch()
    watch = Watch(lambda: node_registry(tmp_path).collect(), kept_for(load_objectives()))
    await watch.sample()
    (tmp_path / "counter_4711.db").unlink()
    await watch.sample()

    assert watch.ring.window(60.0) is None
    assert (await console.http.get("/console/live")).json()["moments"] == []
