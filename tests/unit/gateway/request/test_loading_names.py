"""Names that a gateway loads when they are asked for: answers meanwhile, memory, and a store that is unavailable."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from services.contracts.recommend import Filters, Reason, Tier
from services.errors import DependencyUnavailable, NotFound
from services.gateway.request import names as names_module
from services.gateway.request.live_bundle import memory_of
from services.gateway.request.names import NameResidency
from services.items.live_items import Knowledge
from services.residency.state import ModelBytes
from tests.support.gateway.fakes import FakeLlm
from tests.support.wait import until
from tests.unit.gateway.world import World, add_version, catalogue_of, make_world, publish

NAMES = ("mail", "news", "home")


@dataclass
class Scene:
    """A started world of four names with room for two of them; `gate` holds loads back."""

    world: World
    root: Path
    gate: Event
    num_loads: dict[str, int]

    async def ask(self, name: str, **fields: Any) -> tuple[str, Tier, Reason, int]:
        """Return version, tier, reason and number of items of an answer for a name."""
        answer = await self.world.recommend("long", surface=name, **{"deadline_ms": 3_000, **fields})
        return answer.bundle_version, answer.tier, answer.reason, len(answer.items)

    def loaded(self) -> set[str]:
        """Return the loaded names."""
        return {live.name for live in self.world.plane.names.loaded}


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """A scene whose gate is open."""
    root = tmp_path / "bundles"
    publish(root, "v1", catalogue_of())
    for name in NAMES:
        add_version(root, name, catalogue_of())
        BundleStore(root, name).promote(name)
    budget = int(2.5 * memory_of(BundleStore(root).open("v1")).total)
    (tmp_path / "surfaces.toml").write_text("".join(f'[{name}]\nmodel = "{name}"\n' for name in NAMES))
    gate, num_loads = Event(), dict.fromkeys(("default", *NAMES), 0)
    gate.set()

    def load_reader(bundle: Bundle, catalogue: object) -> None:
        """Count a load, and wait for the gate."""
        num_loads["default" if bundle.version == "v1" else bundle.version] += 1
        gate.wait(30.0)

    world = make_world(
        root,
        others={name: FakeLlm(["i04"], name) for name in NAMES},
        load_reader=load_reader,
        surfaces_file=tmp_path / "surfaces.toml",
        bundle_poll_s=0.02,
        residency=NameResidency(budget_bytes=budget, min_stay_s=0.0, pinned=frozenset()),
    )
    await world.plane.start()
    yield Scene(world, root, gate, num_loads)
    gate.set()
    await world.plane.stop()


async def test_only_the_first_name_is_loaded_at_the_start(scene: Scene) -> None:
    """Other names are loaded by their first request, which waits for them within its deadline."""
    before = scene.loaded()
    version, tier, _, _ = await scene.ask("mail")

    assert before == {"default"}
    assert (version, tier) == ("mail", Tier.LLM)
    assert scene.loaded() == {"default", "mail"}


async def test_an_item_of_a_name_that_loads_is_never_unknown(scene: Scene) -> None:
    """Reads and patches wait for the tenant's names, and are refused as retriable if a load takes longer."""
    items, only_there = scene.world.plane.items, "i30"
    add_version(scene.root, "wide", catalogue_of(31))
    BundleStore(scene.root, "mail").promote("wide")
    scene.num_loads["wide"] = 0
    scene.gate.clear()
    reading = asyncio.create_task(items.get(only_there))
    await until(lambda: scene.num_loads["wide"])
    scene.gate.set()
    item = await reading
    patched = await items.patch(only_there, {"available": False})

    assert (item.title, patched.available) == ("Item 30", False)
    with pytest.raises(NotFound):
        await items.get("nowhere")


async def test_an_item_is_not_called_unknown_before_its_name_is_loaded(scene: Scene) -> None:
    """A load that outlasts the wait, and a store that does not answer, are errors that say when to retry."""
    scene.gate.clear()
    with pytest.raises(DependencyUnavailable, match="bundle of"):
        await scene.world.plane.items.get("nowhere")
    scene.gate.set()
    shutil.move(scene.root, scene.root.with_name("away"))
    scene.root.write_text("")
    with pytest.raises(DependencyUnavailable):
        await scene.world.plane.items.get("nowhere")


async def test_an_item_is_not_called_unknown_before_the_states_of_items_are(scene: Scene) -> None:
    """With a snapshot's states only, an unknown item may have been put since: the answer says to retry."""
    live_items, items = scene.world.items.live_items, scene.world.plane.items
    for name in NAMES:
        await scene.ask(name)
    live_items.knowledge = Knowledge.SNAPSHOT
    with pytest.raises(DependencyUnavailable, match="states of items"):
        await items.get("nowhere")

    assert (await items.get("i03")).title == "Item 3"


async def test_a_version_counts_its_memory_without_a_limit_too(tmp_path: Path) -> None:
    """A pinned name without a bundle takes no memory, and that of the version that is promoted later."""
    root = tmp_path / "bundles"
    publish(root, "v1", catalogue_of())
    residency = NameResidency(budget_bytes=None, min_stay_s=0.0, pinned=frozenset({"mail"}))
    world = make_world(root, others={"mail": FakeLlm(["i04"], "mail")}, bundle_poll_s=0.02, residency=residency)
    await world.plane.start()

    def held() -> float:
        return world.metric("tailrace_model_resident_bytes", part="gateway", name="mail")

    before = held()
    BundleStore(root, "mail").promote("v1")
    await until(held)
    await world.plane.stop()

    assert (before, held()) == (0, memory_of(BundleStore(root).open("v1")).own)


async def test_while_a_name_loads_its_popular_items_answer(scene: Scene) -> None:
    """A hundred first calls of one name start one load, and each is answered with allowed popular items in time."""
    scene.gate.clear()
    calls = [scene.ask("mail", k=5, filters=Filters(categories=("even",))) for _ in range(100)]
    answers = await asyncio.gather(*calls)
    scene.gate.set()
    await until(lambda: "mail" in scene.loaded())

    assert {reason for _, _, reason, _ in answers} <= {Reason.MODEL_LOADING, Reason.SHED}  # all begin at once
    assert {(version, tier, number) for version, tier, _, number in answers} == {("mail", Tier.POPULAR, 5)}
    assert scene.num_loads["mail"] == 1
    assert (await scene.ask("mail"))[1] is Tier.LLM


async def test_the_name_that_was_used_longest_ago_is_unloaded(scene: Scene) -> None:
    """A third name displaces another, and a displaced name is loaded again; the first name stays."""
    for name in ("mail", "news", "home", "mail"):
        await scene.ask(name)
        await until(lambda name=name: scene.loaded() == {"default", name})  # type: ignore[misc]

    assert scene.num_loads == {"default": 1, "mail": 2, "news": 1, "home": 1}


async def test_names_with_equal_catalogues_share_one(scene: Scene) -> None:
    """The catalogue of two names is one object, whose memory counts once, and each name has its own item states."""
    await scene.ask("mail")
    first, other = (scene.world.plane.names.of(name).current() for name in ("default", "mail"))
    sizes = [memory_of(BundleStore(scene.root).open(version)) for version in ("v1", "mail")]

    assert other.catalogue is first.catalogue
    assert other.items is not first.items
    assert ModelBytes.sum(sizes).total < sum(size.total for size in sizes)


async def test_a_bundle_in_use_stays_in_memory_until_its_request_ends(scene: Scene) -> None:
    """A name whose bundle is referenced occupies its memory, so the next name waits."""
    await scene.ask("mail")
    held = scene.world.plane.names.of("mail").current()
    _, _, reason, _ = await scene.ask("news")
    loaded = scene.loaded()
    del held
    await until(lambda: "news" in scene.loaded())

    assert reason is Reason.MODEL_LOADING
    assert "news" not in loaded


async def test_a_name_whose_bundle_is_damaged_answers_with_its_popular_items(scene: Scene) -> None:
    """The other files of a damaged version are not served, and no other name is affected."""
    path = scene.root / "mail" / "catalogue.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    assert await scene.ask("mail") == ("mail", Tier.POPULAR, Reason.MODEL_LOADING, 3)
    assert (await scene.ask("news"))[1] is Tier.LLM


async def test_a_name_whose_manifest_cannot_be_read_answers_with_the_default_names_items(scene: Scene) -> None:
    """The answer names the version whose popular items it shows, and the name answers itself once it can be read."""
    manifest, names = scene.root / "mail" / "manifest.json", scene.world.plane.names
    await until(lambda: names.has_read_manifests)
    names.of("mail")._last_version = names.of("mail")._popular = None
    content = manifest.read_bytes()
    manifest.write_bytes(b"{")
    answer = await scene.ask("mail")
    manifest.write_bytes(content)

    assert answer == ("v1", Tier.POPULAR, Reason.MODEL_LOADING, 3)
    await until(lambda: names._residents.failure("mail") is not None)
    names._residents._failures.clear()
    assert (await scene.ask("mail"))[0] == "mail"


async def test_the_popular_items_that_were_asked_for_last_are_kept(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for more names, the name that was asked for longest ago is forgotten."""
    monkeypatch.setattr(names_module, "_MAX_PARTIAL", 2)
    scene.gate.clear()
    for name in ("mail", "news", "mail", "home"):
        await scene.ask(name, deadline_ms=1_000)

    assert list(scene.world.plane.names._partial) == ["mail", "home"]


async def test_a_manifest_that_is_read_too_slowly_is_replaced_within_the_deadline(scene: Scene) -> None:
    """Requests for a name wait for its manifest for a part of their deadline."""
    names, slow = scene.world.plane.names, Event()
    await until(lambda: names.has_read_manifests)
    scene.gate.clear()
    mail = names.of("mail")
    mail._popular = None
    read = mail.partial
    mail.partial = lambda: slow.wait(30.0) and read()  # type: ignore[method-assign, assignment, return-value]
    version, tier, _, num_items = await scene.ask("mail", deadline_ms=1_000)
    slow.set()

    assert (version, tier, num_items) == ("v1", Tier.POPULAR, 3)


async def test_another_name_answers_while_a_slow_store_keeps_all_readers(scene: Scene) -> None:
    """The substitute name's popular items are on this machine, and wait for no read of the store."""
    names, slow = scene.world.plane.names, Event()
    await until(lambda: names.has_read_manifests)
    scene.gate.clear()
    for name in NAMES:
        names.of(name)._popular = None
    for _ in range(20):
        names._reading.submit(slow.wait, 30.0)
    answers = await asyncio.gather(*(scene.ask(name, deadline_ms=1_000) for name in NAMES))
    slow.set()

    assert [(version, tier, number) for version, tier, _, number in answers] == [("v1", Tier.POPULAR, 3)] * len(NAMES)


async def test_popular_items_that_were_read_before_wait_for_no_reader(scene: Scene) -> None:
    """While a slow store keeps all readers, each name answers with its own popular items."""
    names, slow = scene.world.plane.names, Event()
    await until(lambda: names.has_read_manifests)
    scene.gate.clear()
    for _ in range(20):
        names._reading.submit(slow.wait, 30.0)
    answers = await asyncio.gather(*(scene.ask(name, deadline_ms=1_000) for name in NAMES))
    slow.set()

    assert [(version, tier) for version, tier, _, _ in answers] == [(name, Tier.POPULAR) for name in NAMES]


async def test_a_name_without_a_bundle_is_refused_until_one_is_promoted(scene: Scene) -> None:
    """A name without a record is unavailable, and follows its first promotion."""
    shutil.rmtree(scene.root / "names" / "home.json", ignore_errors=True)
    (scene.root / "names" / "home.json").unlink(missing_ok=True)
    scene.world.plane.names.of("home")._last_version = None
    with pytest.raises(DependencyUnavailable):
        await scene.ask("home")
    BundleStore(scene.root, "home").promote("home")
    await until(lambda: "home" in scene.loaded())

    assert (await scene.ask("home"))[0] == "home"
