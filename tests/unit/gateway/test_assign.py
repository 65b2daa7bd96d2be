"""Assignments reported by both doors equal the assignments of requests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway.fakes import FakeLlm
from tests.unit.gateway.clients import Door
from tests.unit.gateway.surfaces.test_experiments import EXPERIMENTS, SURFACES
from tests.unit.gateway.test_names import publish_names
from tests.unit.gateway.world import World, make_world

NAMES = '[mail]\nmodel = "mail"\n[news]\nmodel = "news"\n'
MODELS = """
[layers.models]
salt = "models-1"
[experiments.model]
layer = "models"
surfaces = ["home"]
share = 1.0
[experiments.model.variants.default]
[experiments.model.variants.mail]
name = "mail"
"""
UNITS = [f"u{number}" for number in range(40)]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A world with three names ("news" without a live version), a canary for half the users, and three experiments."""
    publish_names(tmp_path / "bundles")
    surfaces, experiments = tmp_path / "surfaces.toml", tmp_path / "experiments.toml"
    surfaces.write_text(SURFACES + NAMES)
    experiments.write_text(EXPERIMENTS + MODELS)
    others = {name: FakeLlm([], "m1") for name in ("mail", "news")}
    made = make_world(tmp_path / "bundles", surfaces_file=surfaces, experiments_file=experiments, others=others)
    await made.plane.start()
    yield made
    await made.plane.stop()


async def test_the_answer_is_what_requests_get(door: Door, world: World) -> None:
    """For 40 users and sessions, version, canary, model name and variants are as in requests on every surface."""
    seen = set()
    for unit in UNITS:
        reply, of_session = await door.assignment(user_id=unit), await door.assignment(session_id=unit)
        assigned = {surface["surface"]: surface for surface in reply.body["surfaces"]}
        got = {
            name: (await door.recommend({"user_id": unit, "k": 1} | ({"surface": name} if name else {}))).body
            for name in (None, "home", "mail")
        }

        assert of_session.body == reply.body
        assert list(assigned) == [None, "home", "home-fresh", "cart", "mail", "news"]
        assert {name: assigned[name]["bundle_version"] for name in got} == {
            name: answer["bundle_version"] for name, answer in got.items()
        }
        assert {name: surface["is_canary"] for name, surface in assigned.items()} == {
            name: surface["bundle_version"] == "v2" for name, surface in assigned.items()
        }
        assert (assigned["news"]["name"], assigned["news"]["bundle_version"]) == ("news", None)
        variants = assigned["home"]["variants"]
        assert (variants["model"] == "mail") == (assigned["home"]["name"] == "mail")
        if variants["model"] == "default":
            assert (variants.get("fresher") == "fresh") == (got["home"]["items"][0]["item_id"] == "i08")
        assert all(surface["variants"] == {} for name, surface in assigned.items() if name != "home")
        seen.add((variants.get("fresher"), variants["model"], assigned[None]["is_canary"]))

    assert {variant for variant, _, _ in seen} == {None, "control", "fresh"}
    assert {name for _, name, _ in seen} == {"default", "mail"}
    assert {is_canary for _, _, is_canary in seen} == {False, True}


@pytest.mark.parametrize(
    ("unit", "field"),
    [({}, "user_id"), ({"user_id": "a\n"}, "user_id"), ({"session_id": "s" * 257}, "session_id")],
    ids=["neither", "control character", "too long"],
)
async def test_a_wrong_unit_is_refused(door: Door, unit: dict[str, str], field: str) -> None:
    """Both doors name the field."""
    reply = await door.assignment(**unit)

    assert (reply.code, reply.field) == ("invalid_request", field)
