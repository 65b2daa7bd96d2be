"""Several model names, and a canary next to a live version: the bundle of each answer, in every tier."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from models.registry.canary import CanaryStage
from models.registry.storage.folder import FolderStorage
from models.registry.store import BundleStore
from services.contracts.access import Priority
from services.contracts.events import decode_impression
from services.contracts.experiments import place_of
from services.gateway.tiers.popular import rank_by_popularity
from tests.support.gateway.fakes import FakeLlm
from tests.support.wait import until
from tests.unit.gateway.clients import Door, RestClient
from tests.unit.gateway.world import NOW_S, World, add_version, catalogue_of, make_world, publish, user

NOW_MS = int(NOW_S * 1_000)
SURFACES = '[mail]\nmodel = "mail"\n[news]\nmodel = "news"\n'


def publish_names(root: Path) -> BundleStore:
    """Publish v1 (20 items, live), v2 (25 items, canary for half of the users), and m1 (7 items, live as mail)."""
    publish(root, "v1", catalogue_of())
    add_version(root, "v2", catalogue_of(25))
    add_version(root, "m1", catalogue_of(7))
    store = BundleStore(root)
    store.named("mail").promote("m1")
    store.release("v2", [CanaryStage(0.5, 0.0), CanaryStage(0.75, 0.0), CanaryStage(1.0, 0.0)], NOW_MS)
    return store


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    return publish_names(tmp_path / "bundles")


@pytest.fixture
async def world(store: BundleStore, tmp_path: Path) -> AsyncIterator[World]:
    """A started world that serves the three names."""
    (tmp_path / "surfaces.toml").write_text(SURFACES)
    others = {name: FakeLlm([f"i{index:02}" for index in range(4, 7)], "m1") for name in ("mail", "news")}
    world = make_world(tmp_path / "bundles", surfaces_file=tmp_path / "surfaces.toml", others=others)
    await world.plane.start()
    yield world
    await world.plane.stop()


def units(store: BundleStore, *, canary: bool, number: int = 3, stage: int = 0) -> list[str]:
    """Return unit ids that are, or are not, in the canary at a stage."""
    release = store.record().canary
    assert release is not None
    names = (f"u{index}" for index in range(10_000))
    share = release.stages[stage].share
    return [unit for unit in names if (place_of(release.salt, unit) < share) is canary][:number]


def tops(answer: Any) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


async def both(world: World, door: Door, store: BundleStore, **body: Any) -> list[tuple[str, str, list[str]]]:
    """Return tier, bundle version and items for one user of the live version and one of the canary."""
    replies = [
        (await door.recommend({"k": 3, "deadline_ms": 4_000, "user_id": units(store, canary=canary)[0], **body})).body
        for canary in (False, True)
    ]
    return [(reply["tier"], reply["bundle_version"], tops(reply)) for reply in replies]


def know(world: World, store: BundleStore, *history: str, **stored: Any) -> None:
    """Set this history for the users of both versions and, for each version, this stored list."""
    for canary, version in ((False, "v1"), (True, "v2")):
        for unit in units(store, canary=canary):
            world.features.users[unit] = user(*history, **({**stored, "bundle_version": version} if stored else {}))


async def test_unknown_users_get_the_popular_items_of_their_version(
    world: World, door: Door, store: BundleStore
) -> None:
    """The same windows rank each bundle's items; an item that only the canary has leads only there, also when shed."""
    world.features.popular = [("i24", 100.0)]
    await world.plane.popular.refresh()

    full = await both(world, door, store)
    world.strain(1)
    shed = await both(world, door, store)

    assert full == [("popular", "v1", ["i00", "i01", "i02"]), ("popular", "v2", ["i24", "i00", "i01"])]
    assert shed == full


async def test_the_student_is_that_of_the_version(world: World, door: Door, store: BundleStore) -> None:
    """Short histories are ranked over the catalogue of the user's version."""
    know(world, store, "i00")

    assert await both(world, door, store) == [
        ("student", "v1", ["i19", "i18", "i17"]),
        ("student", "v2", ["i24", "i23", "i22"]),
    ]


async def test_stored_lists_are_those_of_the_version(world: World, door: Door, store: BundleStore) -> None:
    """A stored list is used only by the version that made it."""
    know(world, store, "i00", "i01", "i02", listed=tuple(f"i{index:02}" for index in range(8, 19)))
    own = await both(world, door, store)
    (live, *_), (canary, *_), users = units(store, canary=False), units(store, canary=True), world.features.users
    users[live], users[canary] = users[canary], users[live]
    swapped = await both(world, door, store)

    assert own == [("precomputed", version, ["i08", "i09", "i10"]) for version in ("v1", "v2")]
    assert {tier for tier, *_ in swapped}.isdisjoint({"precomputed"})


async def test_a_candidate_that_the_llm_has_not_loaded_is_answered_by_its_student(
    world: World, door: Door, store: BundleStore
) -> None:
    """A replica without the canary rejects its requests, while the live version's users keep the LLM."""
    know(world, store, "i00", "i01", "i02", "i03")

    (live, canary) = await both(world, door, store)

    assert live[:2] == ("llm", "v1")
    assert canary == ("student", "v2", ["i24", "i23", "i22"])
    assert [request.bundle_version for request in world.llm.requests] == ["v1", "v2"]


async def test_similar_and_popular_items_keep_to_a_visitors_session(
    world: World, door: Door, store: BundleStore
) -> None:
    """A visitor has the version of the session, or the live version without one; a user id takes precedence."""
    (live, *_), (canary, *_) = units(store, canary=False), units(store, canary=True)
    bodies = [{"session_id": live}, {"session_id": canary}, {}, {"user_id": live, "session_id": canary}]

    similar = [(await door.similar(["i19"], {"k": 2, "deadline_ms": 4_000, **body})).body for body in bodies]
    ranked = [
        (await door.recommend({"k": 1, "deadline_ms": 4_000, "recent_item_ids": ["i03"], **body})).body
        for body in bodies
    ]
    popular = [(await door.popular(session_id=session_id)).body for session_id in (live, canary, None)]

    assert [tops(answer) for answer in similar] == [["i00", "i01"], ["i20", "i21"], ["i00", "i01"], ["i00", "i01"]]
    assert [answer["bundle_version"] for answer in ranked] == ["v1", "v2", "v1", "v1"]
    assert [answer["bundle_version"] for answer in popular] == ["v1", "v2", "v1"]


async def test_a_batch_reads_the_users_of_each_version_together(world: World, door: Door, store: BundleStore) -> None:
    """The store is read once per version, and the entries get the answers of single requests."""
    live, canary = units(store, canary=False), units(store, canary=True)
    know(world, store, "i00")
    entries = [{"user_id": user_id, "k": 1} for pair in zip(live, canary, strict=True) for user_id in pair]

    reply = await door.batch({"requests": entries, "deadline_ms": 4_000})

    assert [answer["bundle_version"] for answer in reply.body["answers"]] == ["v1", "v2"] * 3
    assert sorted(world.features.read_together) == sorted([tuple(live), tuple(canary)])


async def test_a_request_without_a_list_is_on_record_with_its_assignment(
    world: World, door: Door, store: BundleStore
) -> None:
    """During a release, failed and shed requests of each version's users are recorded; without one they are not."""
    users = {version: units(store, canary=version == "v2")[0] for version in ("v1", "v2")}
    body = {"k": 1, "filters": {"categories": ["no such category"]}}

    for user_id in users.values():
        await door.recommend({"user_id": user_id, **body})
    await door.recommend(body)
    world.strain(2)
    await world.recommend(users["v2"], priority=Priority.LOW)
    store.end_canary("v2")
    await world.plane.names.first.refresh()
    await world.recommend(users["v2"], priority=Priority.LOW)
    await door.recommend({"user_id": users["v2"], **body})

    recorded = [decode_impression(value) for _, value in world.impressions.records]
    assert [(impression.user_id, impression.bundle_version, impression.failure) for impression in recorded] == [
        *((user_id, version, "invalid_request") for version, user_id in users.items()),
        (users["v2"], "v2", "shed"),
    ]


async def test_pages_go_on_when_the_version_changes(world: World, door: Door, store: BundleStore) -> None:
    """A token of the canary excludes the same items after its end: marks identify items, not bundle positions."""
    (unit, *_) = units(store, canary=True)
    first = (await door.recommend({"user_id": unit, "k": 3, "deadline_ms": 4_000})).body
    store.end_canary("v2")
    await world.plane.names.first.refresh()

    second = (await door.recommend({"user_id": unit, "k": 3, "deadline_ms": 4_000, "next": first["next"]})).body

    assert [first["bundle_version"], second["bundle_version"]] == ["v2", "v1"]
    assert not {*tops(first)} & {*tops(second)}


async def test_a_metric_says_whether_the_store_answers(tmp_path: Path) -> None:
    """It needs no poll: no record is read while the store is unavailable."""
    storage = FolderStorage(tmp_path)
    world = make_world(tmp_path, ports={"bundles": BundleStore(storage)})

    for is_lost in (True, False):
        storage.is_lost = is_lost
        assert world.metric("tailrace_bundle_store_lost") == is_lost


async def test_a_growing_share_moves_nobody_back_and_the_end_moves_all(world: World, store: BundleStore) -> None:
    """Of 300 users, those in the canary stay in it at each stage; promotion serves it to all without reloading."""
    names = world.plane.names
    everybody = [f"u{number}" for number in range(300)]

    def candidates() -> set[str]:
        return {unit for unit in everybody if names.find(None, unit, NOW_MS).version == "v2"}

    half = candidates()
    loaded = next(live for live in names.loaded if live.version == "v2")
    store.move_canary("v2", 1, NOW_MS + 1, NOW_MS)
    await names.first.refresh()
    before_it_holds = candidates()
    store.move_canary("v2", 1, NOW_MS, NOW_MS)
    await names.first.refresh()
    most = candidates()
    store.promote("v2")
    await names.first.refresh()

    assert 100 < len(half) < 200
    assert before_it_holds == half < most
    assert candidates() == set(everybody)
    assert names.first.current() is loaded
    assert [live.version for live in names.first.loaded] == ["v2"]


async def test_each_surface_is_answered_by_its_name(world: World, door: Door, store: BundleStore) -> None:
    """A name without a live version rejects only its own requests; impressions and metrics have the name."""
    know(world, store, "i00", "i01", "i02", "i03")
    asked = {"user_id": units(store, canary=False)[0], "k": 2, "deadline_ms": 4_000}
    default, mail = [(await door.recommend(body)).body for body in (asked, {**asked, "surface": "mail"})]
    refused = await door.recommend({**asked, "surface": "news"})

    assert (default["bundle_version"], mail["bundle_version"]) == ("v1", "m1")
    assert tops(mail) == ["i04", "i05"]
    assert (refused.code, refused.message) == ("unavailable", "bundle of news is unavailable")
    await until(lambda: len(world.impressions.records) == 2)
    assert {json.loads(value or b"")["name"] for _, value in world.impressions.records} == {"default", "mail"}
    served = [
        world.metric("tailrace_bundle_info", version=version, name=name, role=role)
        for version, name, role in (("v1", "default", "live"), ("v2", "default", "canary"), ("m1", "mail", "live"))
    ]
    assert served == [1, 1, 1]
    assert world.plane.is_ready()


async def test_an_llm_that_fails_closes_its_own_gate_alone(world: World, store: BundleStore) -> None:
    """The breaker of mail opens, and the default name's LLM still answers."""
    know(world, store, "i00", "i01", "i02", "i03")
    (unit, *_) = units(store, canary=False)
    world.others["mail"].error = ZeroDivisionError()
    for _ in range(3):
        await world.recommend(unit, surface="mail")

    answer = await world.recommend(unit, deadline_ms=4_000)

    assert answer.tier == "llm"
    assert [world.metric("tailrace_breaker_open", name=name) for name in ("default", "mail")] == [0, 1]


async def test_a_name_s_bundle_and_release_can_be_read(rest: RestClient, store: BundleStore) -> None:
    """`/v1/bundle` has the name, its live version and its canary; an unknown name is rejected with the known names."""
    default, mail, unknown, odd = [
        await rest.http.get(f"/v1/bundle{query}") for query in ("", "?name=mail", "?name=fr", "?nam=mail")
    ]

    assert default.json() | {"manifest": {}} == {
        "name": "default",
        "version": "v1",
        "num_items": 20,
        "code_depth": 1,
        "manifest": {},
        "canary": {"version": "v2", "share": 0.5},
    }
    assert (mail.json()["version"], mail.json()["canary"]) == ("m1", None)
    assert unknown.json()["error"] | {"request_id": ""} == {
        "code": "invalid_request",
        "message": "unknown name 'fr'",
        "field": "name",
        "fix": "this stack serves default, mail, news",
        "request_id": "",
    }
    assert odd.json()["error"]["field"] == "nam"


async def test_rankings_end_with_their_bundles(world: World, store: BundleStore) -> None:
    """Rankings are freed with their bundle, so releases leak no memory."""
    kept = world.plane.popular._rankings
    before = {live.version for live in kept}
    store.end_canary("v2")
    await world.plane.names.first.refresh()

    assert before == {"v1", "v2", "m1"}
    await until(lambda: {live.version for live in kept} == {"v1", "m1"})
    for live in world.plane.names.loaded:
        ranking = rank_by_popularity(live.version, live.items, ())
        assert world.plane.popular.ranking(live).order.tolist() == ranking.order.tolist()
