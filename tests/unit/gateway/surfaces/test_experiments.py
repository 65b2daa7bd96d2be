"""Active experiments: variants at both doors, their records, and changes of the files."""

import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import structlog

from services.contracts.events import decode_impression
from services.contracts.experiments import parse_experiments
from services.contracts.recommend import Tier
from services.errors import ConfigError
from services.gateway.followed_file import POLL_S, FileState
from services.gateway.surfaces.experiments import RunningExperiments
from services.gateway.surfaces.surfaces import Surfaces
from tests.support.spans import Recorder
from tests.support.wait import until, until_answer
from tests.unit.gateway.clients import Door, RestClient
from tests.unit.gateway.world import NOW_S, World, make_world, started_world

SURFACES = """
[home]
k = 3
deadline_ms = 500

[home.rules]
pins = [{ item_id = "i09", position = 1 }]

[home-fresh.rules]
pins = [{ item_id = "i08", position = 1 }]

[cart]
k = 2
"""
EXPERIMENTS = """
[layers.ranking]
salt = "ranking-1"
[layers.page]
salt = "page-1"

[experiments.fresher]
layer = "ranking"
surfaces = ["home"]
share = 0.5
exclude_users = ["qa"]
[experiments.fresher.variants.control]
[experiments.fresher.variants.fresh]
rules = "home-fresh"
deadline_ms = 300
tiers = ["student"]

[experiments.layout]
layer = "page"
surfaces = ["home"]
share = 1.0
[experiments.layout.variants.a]
[experiments.layout.variants.b]
"""
UNITS = [f"u{number}" for number in range(2_000)]


def in_variant(variant: str | None) -> str:
    """Return a user of this variant of `fresher`; None means a user outside the experiment."""
    fresher = parse_experiments(EXPERIMENTS).by_name["fresher"]
    return next(unit for unit in UNITS if fresher.variant_of(unit) == variant)


FRESH, CONTROL, OUTSIDE = (in_variant(variant) for variant in ("fresh", "control", None))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Paths of the surfaces and experiments files."""
    surfaces, experiments = tmp_path / "surfaces.toml", tmp_path / "experiments.toml"
    surfaces.write_text(SURFACES)
    experiments.write_text(EXPERIMENTS)
    return surfaces, experiments


@pytest.fixture
async def world(tmp_path: Path, files: tuple[Path, Path]) -> AsyncIterator[World]:
    async with started_world(tmp_path, surfaces_file=files[0], experiments_file=files[1]) as made:
        made.features.users |= dict.fromkeys((FRESH, CONTROL, OUTSIDE), made.features.users["long"])
        yield made


def in_force(
    files: tuple[Path, Path], states: list[FileState] | None = None, now_s: float = NOW_S
) -> RunningExperiments:
    """Load both files."""
    record = (lambda _: None) if states is None else states.append
    return RunningExperiments(files[1], Surfaces(files[0]), record, lambda: now_s)


@pytest.mark.parametrize(
    ("body", "tier", "first", "deadline_ms", "fresher"),
    [
        ({"user_id": FRESH}, Tier.STUDENT, "i08", 300, "fresh"),
        ({"user_id": CONTROL}, Tier.LLM, "i09", 500, "control"),
        ({"user_id": OUTSIDE}, Tier.LLM, "i09", 500, None),
        ({"session_id": FRESH, "recent_item_ids": ["i03", "i04", "i05"]}, Tier.STUDENT, "i08", 300, "fresh"),
        ({"session_id": CONTROL, "user_id": FRESH}, Tier.STUDENT, "i08", 300, "fresh"),
        ({"user_id": FRESH, "deadline_ms": 400}, Tier.STUDENT, "i08", 400, "fresh"),
    ],
    ids=["fresh", "control", "outside", "session", "user before session", "own deadline"],
)
async def test_a_variant_sets_what_its_users_get_and_records_name_it(
    door: Door,
    rest: RestClient,
    world: World,
    recorder: Recorder,
    body: dict[str, object],
    tier: Tier,
    first: str,
    deadline_ms: int,
    fresher: str | None,
) -> None:
    """Rules, deadline and tiers follow the variant of the user, else of the session, and all records name it."""
    with structlog.testing.capture_logs() as logs:
        reply = await door.recommend({**body, "surface": "home", "request_id": "r1"})
        await until(lambda: world.impressions.records)
    await world.plane.explanations.flush()
    explained = (await rest.http.get("/v1/explanations/r1")).json()
    root = next(span for span in recorder.spans if "tailrace.request_id" in (span.attributes or {}))

    assert (reply.body["tier"], reply.body["deadline_ms"]) == (tier, deadline_ms)
    assert reply.body["items"][0]["item_id"] == first
    impression = decode_impression(world.impressions.records[0][1])
    recorded = impression.variant or ""
    assert (impression.session is None) == ("user_id" in body)
    assert FRESH.encode() not in (world.impressions.records[0][1] or b"") or "user_id" in body
    assert ("fresher=" + (fresher or "") in recorded) == (fresher is not None)
    assert "layout=" in recorded
    assert {line["variant"] for line in logs if line["event"] == "recommended"} == {recorded}
    assert (root.attributes or {})["tailrace.variant"] == recorded
    assert explained["variant"] == recorded
    assert (f"variant {fresher} of fresher" in " ".join(explained["sentences"])) == (fresher is not None)


async def test_who_is_in_no_experiment_gets_the_surface_as_it_is(world: World) -> None:
    """Another surface, no surface, and a visitor without a session record no variant."""
    for surface, user_id in (("cart", FRESH), (None, FRESH), ("home", None)):
        world.impressions.records.clear()
        await world.recommend(user_id, surface=surface, recent_item_ids=("i03",))
        await until(lambda: world.impressions.records)

        assert decode_impression(world.impressions.records[0][1]).variant is None


async def test_replicas_and_restarts_assign_alike(world: World, tmp_path: Path, files: tuple[Path, Path]) -> None:
    """Gateways that share only the files give 2,000 users the same variants."""
    other = make_world(tmp_path / "bundles", surfaces_file=files[0], experiments_file=files[1])
    finders = [replica.plane.experiments for replica in (world, other)]

    assigned = [[finder.find("home", unit).variant for unit in UNITS] for finder in finders]

    assert assigned[0] == assigned[1]
    assert len(set(assigned[0])) == 6  # with and without `fresher`, times both of `layout`


def test_without_a_running_experiment_a_surface_is_the_file_s_own(files: tuple[Path, Path]) -> None:
    """Without a file, outside the dates, and for excluded users, the surface is unchanged."""
    dated = EXPERIMENTS.replace(
        "share = 1.0", "share = 1.0\nstarts = 2027-02-01T00:00:00Z\nends = 2027-03-01T00:00:00Z"
    )
    files[1].write_text(dated)
    surfaces = Surfaces(files[0])

    assert RunningExperiments(None, surfaces).find("home", FRESH) is surfaces.find("home")
    assert in_force(files).find("home", "qa").variant is None
    assert "layout" not in (in_force(files).find("home", FRESH).variant or "")
    assert "layout" in (in_force(files, now_s=1_802_000_000).find("home", FRESH).variant or "")


@pytest.mark.parametrize(
    ("slip", "error"),
    [
        (('surfaces = ["home"]', 'surfaces = ["hom"]'), "experiments.fresher.surfaces: 'hom' is unknown; .*'home'"),
        (('"home-fresh"', '"home-frsh"'), "experiments.fresher.variants.fresh.rules: 'home-frsh' is .*'home-fresh'"),
        (("deadline_ms = 300", 'name = "fr"'), "experiments.fresher.variants.fresh.name: 'fr' is .*'default'"),
        (('layer = "page"', 'layer = "pages"'), "experiments.layout.layer"),
        (("[experiments.fresher]", "[experiments"), "not TOML"),
        ((EXPERIMENTS, f"a = {'[' * 5_000}"), "not TOML"),
        ((EXPERIMENTS, ""), "cannot be read"),
    ],
    ids=["surface", "rules", "name", "contract", "broken", "nested", "gone"],
)
def test_a_bad_file_changes_nothing_and_says_why(files: tuple[Path, Path], slip: tuple[str, str], error: str) -> None:
    """The active experiments stay until the file is valid again; state and one log line report the entry."""
    states: list[FileState] = []
    experiments = in_force(files, states)

    with structlog.testing.capture_logs() as logs:
        if text := EXPERIMENTS.replace(*slip, 1):
            files[1].write_text(text)
        else:
            files[1].unlink()
        experiments.refresh()
        experiments.refresh()
    kept = experiments.find("home", FRESH).deadline_ms
    files[1].write_text(EXPERIMENTS.replace("deadline_ms = 300", "deadline_ms = 200"))
    experiments.refresh()

    assert kept == 300
    assert experiments.find("home", FRESH).deadline_ms == 200
    assert states == [FileState.CURRENT, FileState.OUTDATED, FileState.CURRENT]
    assert [line["event"] for line in logs] == ["experiments_refused"]
    assert re.search(f"experiments.toml.*{error}", logs[0]["error"])


@pytest.mark.parametrize("text", ["[experiments", EXPERIMENTS.replace('layer = "page"', 'layer = "pages"')])
def test_at_the_start_the_file_must_be_right_by_itself(files: tuple[Path, Path], text: str) -> None:
    """A gateway with an invalid file does not start."""
    files[1].write_text(text)

    with pytest.raises(ConfigError, match=r"experiments\.toml"):
        in_force(files)


async def test_an_experiment_that_loses_a_surface_is_suspended(world: World, files: tuple[Path, Path]) -> None:
    """Users of the experiment get the plain surface until its surface returns; other experiments continue."""
    surfaces, states = [], []
    for text in (SURFACES.replace("[home-fresh.rules]", "[other.rules]"), SURFACES):
        files[0].write_text(text)
        world.plane._surfaces.refresh()
        world.plane.experiments.refresh()
        surfaces.append(world.plane.experiments.find("home", FRESH))
        states.append(world.metric("tailrace_experiments_file_state"))

    assert [surface.deadline_ms for surface in surfaces] == [500, 300]
    assert surfaces[0].variant in {"layout=a", "layout=b"}
    assert states == [FileState.OUTDATED, FileState.CURRENT]


def test_an_experiment_that_has_ended_needs_no_surface(files: tuple[Path, Path]) -> None:
    """An ended experiment may stay in the file, where reports read its dates and fractions."""
    files[1].write_text(EXPERIMENTS.replace("share = 0.5", "share = 0.5\nends = 2026-12-01T00:00:00Z"))
    files[0].write_text(SURFACES.replace("home-fresh", "other"))
    states: list[FileState] = []

    in_force(files, states).refresh()

    assert states == [FileState.CURRENT]


async def test_files_that_change_together_come_into_force_together(world: World, files: tuple[Path, Path]) -> None:
    """Both files take effect together, regardless of the polling order."""
    files[1].write_text(EXPERIMENTS.replace("home-fresh", "home-new"))
    files[0].write_text(SURFACES.replace("home-fresh", "home-new").replace('"i08"', '"i15"'))

    ask = partial(world.recommend, FRESH, surface="home")
    await until_answer(ask, lambda answer: answer.items[0].item_id == "i15", timeout_s=20 * POLL_S)
    await until(lambda: not world.metric("tailrace_experiments_file_state"), timeout_s=20 * POLL_S)
    await until(lambda: not world.metric("tailrace_surfaces_file_state"), timeout_s=20 * POLL_S)
