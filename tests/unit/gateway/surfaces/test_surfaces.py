"""A surface sets what a request leaves open; its file is reloaded on change, and an invalid file changes nothing."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import structlog

from services.contracts.filters import Condition, OneOf
from services.contracts.recommend import Filters, Reason, RecommendRequest, Tier
from services.contracts.rules import Cap, Pin, Rules
from services.errors import ConfigError, InvalidRequest
from services.gateway.followed_file import POLL_S, FileState
from services.gateway.surfaces.surfaces import Surfaces
from tests.support.wait import until_answer
from tests.unit.gateway.world import started_world

CART = """
[cart]
k = 4
deadline_ms = 300
tiers = ["student"]
filter = { must = [{ key = "categories", eq = "even" }] }
locked = ["caps"]

[cart.rules]
caps = [{ attribute = "categories", most = 2 }]
pins = [{ item_id = "i02", position = 1 }]
blocks = [{ key = "item_id", eq = "i18" }]
"""
ODD, I16 = Condition.of("categories", OneOf(("odd",))), Condition.of("item_id", OneOf(("i16",)))


def write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file, with one surface."""
    file = tmp_path / "surfaces.toml"
    file.write_text(CART)
    return file


def request(**fields: object) -> RecommendRequest:
    return RecommendRequest(**{"request_id": "r", "user_id": "u", "surface": "cart", **fields})


def test_what_a_request_leaves_open_is_the_surface_s(path: Path) -> None:
    """k, deadline and rules come from the surface if the request has none; filters and blocks add up."""
    cart = Surfaces(path).find("cart")

    filters, rules = Filters(must=(ODD,)), Rules(pins=(Pin("i04", 2),), blocks=(I16,))

    plain = cart.applied_to(request())
    own = cart.applied_to(request(k=2, deadline_ms=20, filters=filters, rules=rules))

    assert (plain.k, plain.deadline_ms) == (4, 300)
    assert (own.k, own.deadline_ms) == (2, 20)
    assert (own.rules.pins, own.rules.caps) == ((Pin("i04", 2),), (Cap("categories", 2),))
    assert len(own.rules.blocks or ()) == 2
    assert plain.filters.expression is not None
    assert own.filters.expression is not None
    assert all(text in own.filters.expression.text for text in ("odd", "even", "i16", "i18"))
    assert "odd" not in plain.filters.expression.text


def test_what_is_locked_no_request_may_set(path: Path) -> None:
    """The error names the field and the surface."""
    with pytest.raises(InvalidRequest, match=r"rules\.caps: the surface cart allows no other"):
        Surfaces(path).find("cart").applied_to(request(rules=Rules(caps=())))


def test_an_unknown_surface_is_refused_with_the_nearest(path: Path) -> None:
    """The error names the nearest surface, or says that no surfaces are set up."""
    with pytest.raises(InvalidRequest, match="surface: unknown surface 'crat'; the nearest: 'cart'"):
        Surfaces(path).find("crat")
    with pytest.raises(InvalidRequest, match="leave it out, no surfaces are set up"):
        Surfaces(None).find("cart")


def test_a_served_model_is_a_surface(path: Path) -> None:
    """A request reaches a model by its name, within its tenant; a surface of the same name comes first."""
    surfaces = Surfaces(path, ("default", "mail", "cart", "acme.fr"))

    assert (surfaces.find("mail").name, surfaces.find("mail").model) == ("mail", "mail")
    assert surfaces.find("cart").k == 4
    assert surfaces.find("acme/fr", "acme").model == "acme.fr"
    for name, tenant in (("fr", ""), ("acme/fr", ""), ("mail", "acme"), ("acme/mail", "acme")):
        with pytest.raises(InvalidRequest, match="unknown surface"):
            surfaces.find(name, tenant)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[cart", "text: not TOML"),
        ("a = " + "[" * 5_000, "text: not TOML"),
        ("[cart]\nkk = 3", "cart.kk: unknown; the fields are "),
        ("[cart]\nk = 0", "cart.k: 0 is out of range"),
        ('[cart]\nmodel = "fr"', "cart.model: unknown model 'fr'; this stack serves default"),
        ('[cart]\ntiers = ["lm"]', "cart.tiers.0.: 'lm' is unknown; send one of precomputed, llm"),
        ('[cart]\nlocked = ["cap"]', "cart.locked.0.: unknown 'cap'; the nearest: 'caps'"),
        (
            '[cart]\nfilter = { must = [{ key = "a", range = { lt = nan } }] }',
            r"cart.filter.must.0..range.lt: not a finite",
        ),
        ("[cart.rules]\ncaps = [{ most = 2 }]", r"cart.rules.caps.0..attribute: missing"),
        (
            "[cart.rules]\npins = [{ item_id = 'a', position = 1 }, { item_id = 'b', position = 1 }]",
            r"cart.rules.pins.1..position: 1 is pinned twice",
        ),
        ("[cart]\nexplore = { share = 0, position = 5, of = 50 }", "cart.explore.share: 0 is out of range"),
        ("[cart]\nexplore = { share = 1, position = 5, of = 5 }", "cart.explore.of: 5 is out of range; send 6 to 200"),
        ("[cart]\nexplore = { share = 0.5, position = 5 }", "cart.explore.of: missing"),
        ("['my cart']", "text: 'my cart' is no name"),
        ("\n".join(f"[s{number}]" for number in range(65)), "text: 65 surfaces"),
    ],
)
def test_a_bad_file_stops_the_start_and_is_refused_by_entry(tmp_path: Path, text: str, error: str) -> None:
    """The error names the file, the entry and its allowed values."""
    path = tmp_path / "surfaces.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=rf"TAILRACE_SURFACES_FILE: .*surfaces.toml: {error}"):
        Surfaces(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_text("[cart"),
        lambda file: file.write_text(f"[cart]\nk = {'9' * 5_000}"),
        Path.unlink,
        lambda file: file.write_bytes(b"\xff"),
    ],
)
def test_a_bad_file_changes_nothing_and_says_why(path: Path, spoil: Callable[[Path], object]) -> None:
    """The previous surfaces stay until the file is valid again; the state and a log line report the reason."""
    states: list[FileState] = []
    surfaces = Surfaces(path, on_state=states.append)

    with structlog.testing.capture_logs() as logs:
        spoil(path)
        surfaces.refresh()
        surfaces.refresh()
    kept = surfaces.find("cart").k
    path.write_text("[cart]\nk = 7")
    surfaces.refresh()

    assert kept == 4
    assert surfaces.find("cart").k == 7
    assert states == [FileState.CURRENT, FileState.OUTDATED, FileState.CURRENT]
    assert [line["event"] for line in logs] == ["surfaces_refused"]
    assert "surfaces.toml" in logs[0]["error"]


async def test_a_request_that_names_a_surface_gets_what_applies_there(path: Path, tmp_path: Path) -> None:
    """Tier, filter and rules are the surface's, records name the surface, and a change needs no restart."""
    async with started_world(tmp_path, surfaces_file=path) as world:
        answer = await world.recommend("long", k=None, surface="cart")
        counted = world.metric("tailrace_surface_answers_total", surface="cart", tier="student")
        write(path, CART.replace("k = 4", "k = 1"))
        ask = partial(world.recommend, "long", k=None, surface="cart")
        await until_answer(ask, lambda answer: len(answer.items) == 1, timeout_s=10 * POLL_S)

    assert (answer.tier, answer.reason) == (Tier.STUDENT, Reason.NOT_ON_SURFACE)
    assert [item.item_id for item in answer.items] == ["i16", "i14", "i12", "i10"]
    assert answer.deadline_ms == 300
    assert counted == 1
    assert not world.llm.requests
    assert b'"surface":"cart"' in world.impressions.records[0][1]


async def test_a_surface_that_names_an_unknown_attribute_is_refused_later_and_reported_at_the_start(
    path: Path, tmp_path: Path
) -> None:
    """The gateway starts, since matching items may come later; a reload of such a file changes nothing."""
    slip = CART.replace('key = "categories"', 'key = "category"')
    write(path, slip)
    async with started_world(tmp_path, surfaces_file=path) as world:
        states = [world.metric("tailrace_surfaces_file_state")]
        for text in (CART, slip):
            write(path, text)
            world.plane._surfaces.refresh()
            states.append(world.metric("tailrace_surfaces_file_state"))
        answer = await world.recommend("long", k=None, surface="cart")

    assert states == [FileState.OUTDATED, FileState.CURRENT, FileState.OUTDATED]
    assert len(answer.items) == 4
