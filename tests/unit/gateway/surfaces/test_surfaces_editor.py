"""The surfaces file is replaced atomically, only by an editor of its latest version, and only with valid text."""

import os
import stat
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.contracts.filters import Condition, OneOf
from services.contracts.rules import Boost
from services.errors import InvalidRequest
from services.gateway.surfaces.editor import SurfacesEditor
from services.gateway.surfaces.surfaces import Surfaces, parse_surfaces

CART = """# who edits this: the shop team
[cart]
k = 4   # a row of the page

[cart.rules]
caps = [{ attribute = "categories", most = 2 }]
"""
STYLES = (
    CART,
    "[cart]\nk = 4\n",
    "[cart]\nrules = { boosts = [{ where = { key = 'item_id', eq = 'i01' }, factor = 3 }] }\n",
    "[cart]\n[[cart.rules.boosts]]\nfactor = 3\nwhere = { key = 'item_id', eq = 'i01' }\n",
    "[cart]\nk = 4\n[home]\nk = 2\n[cart.rules]\ndiversity = 0.5\n",
    "cart.k = 4\n",
    "[cart.rules]\nboosts = [\n  # a campaign\n  { where = { key = 'item_id', eq = 'i01' }, factor = 3 },\n]\n",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file, group-writable, with one surface."""
    file = tmp_path / "surfaces.toml"
    file.write_text(CART)
    file.chmod(0o660)
    return file


@pytest.fixture
def editor(path: Path) -> SurfacesEditor:
    return SurfacesEditor(Surfaces(path))


def test_what_is_saved_is_in_force_and_keeps_the_files_rights(path: Path) -> None:
    """A save takes effect at once, keeps the file's mode, and leaves no other file in the folder."""
    surfaces = Surfaces(path)
    editor = SurfacesEditor(surfaces)

    saved = editor.save(CART.replace("k = 4", "k = 5"), editor.read().sha256)

    assert surfaces.find("cart").k == 5
    assert saved == editor.read()
    assert (saved.text, saved.names, saved.problem, saved.read_only) == (path.read_text(), ("cart",), None, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert [file.name for file in path.parent.iterdir()] == ["surfaces.toml"]


def test_of_many_edits_at_once_one_is_saved(path: Path) -> None:
    """Only one of several concurrent edits based on the same text is saved."""
    editors = [SurfacesEditor(Surfaces(path)) for _ in range(8)]
    sha256, saved, refused = editors[0].read().sha256, list[str](), list[InvalidRequest]()

    def save(number: int) -> None:
        try:
            saved.append(editors[number].save(f"[cart]\nk = {number + 1}\n", sha256).text)
        except InvalidRequest as error:
            refused.append(error)

    with ThreadPoolExecutor(len(editors)) as pool:
        list(pool.map(save, range(len(editors))))

    assert saved == [path.read_text()]
    assert {str(error) for error in refused} == {
        "sha256: the file has changed meanwhile; read it again and repeat the edit"
    }
    assert len(refused) == len(editors) - 1


def test_without_a_file_nothing_can_be_saved() -> None:
    """The error names the setting."""
    editor = SurfacesEditor(Surfaces(None))

    assert "TAILRACE_SURFACES_FILE" in (editor.read().read_only or "")
    with pytest.raises(InvalidRequest, match="no file of surfaces is set up; set TAILRACE_SURFACES_FILE"):
        editor.save(CART, editor.read().sha256)


def test_a_file_that_cannot_be_replaced_is_refused(editor: SurfacesEditor, path: Path) -> None:
    """A folder at the path simulates a mounted file, which no rename can replace; root ignores file modes."""
    sha256 = editor.read().sha256
    path.unlink()
    path.mkdir()
    (path / "kept").touch()
    empty = editor.read().sha256

    with pytest.raises(InvalidRequest, match=r"text: the file cannot be written .*; change it where this deployment"):
        editor.save(CART, empty)
    assert empty != sha256
    assert [file.name for file in path.parent.iterdir()] == ["surfaces.toml"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_file_is_reported_before_an_edit(editor: SurfacesEditor, path: Path) -> None:
    """A read-only file is reported and stays unchanged."""
    path.chmod(0o440)

    assert editor.read().read_only == "the file is read-only for the gateway"
    with pytest.raises(InvalidRequest, match="read-only"):
        editor.save("[home]\n", editor.read().sha256)


def test_a_link_goes_on_leading_to_the_file(path: Path) -> None:
    """The link's target is replaced, not the link."""
    link = path.with_name("link.toml")
    link.symlink_to(path.name)
    editor = SurfacesEditor(Surfaces(link))
    editor.save("[home]\n", editor.read().sha256)

    assert link.is_symlink()
    assert path.read_text() == "[home]\n"


def test_what_is_wrong_with_the_file_is_reported_with_its_text(editor: SurfacesEditor, path: Path) -> None:
    """An invalid file is reported with its text, so that it can be repaired here."""
    path.write_bytes(b"[cart\xff")
    read = editor.read()

    assert (read.problem or "").startswith("text: not UTF-8")
    assert editor.save(CART, read.sha256).problem is None


@given(
    text=st.sampled_from(STYLES),
    factors=st.lists(
        st.tuples(st.sampled_from(["i00", "i01", "a \"quoted\" 'id'"]), st.sampled_from([0.5, 1.0, 2.0, 7.25])),
        min_size=1,
        max_size=4,
    ),
)
def test_a_boost_changes_one_weight_and_nothing_else(text: str, factors: list[tuple[str, float]]) -> None:
    """In any style of the file, an item's last factor applies, 1 removes the boost, and other content stays."""
    editor, before = SurfacesEditor(Surfaces(None)), parse_surfaces(text)["cart"]
    wanted = {_eq_of(boost): boost.factor for boost in before.rules.boosts or ()}
    changed = text
    for item_id, factor in factors:
        changed = editor.boosted(changed, "cart", item_id, factor)
        wanted = {name: old for name, old in wanted.items() if name != item_id}
        if factor != 1:
            wanted[item_id] = factor

    after = parse_surfaces(changed)
    assert {_eq_of(boost): boost.factor for boost in after["cart"].rules.boosts or ()} == wanted
    assert (after["cart"].k, after["cart"].rules.caps) == (before.k, before.rules.caps)
    assert after["cart"].rules.diversity == before.rules.diversity
    assert after.keys() == parse_surfaces(text).keys()
    assert changed.count("# who") == text.count("# who")


CLAUSES = st.sampled_from(
    [{"key": "brand", "eq": 'A "quoted" name'}, {"must_not": [{"key": "price", "range": {"gt": 100}}]}]
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "k": st.none() | st.integers(1, 100),
        "deadline_ms": st.none() | st.integers(1, 5_000),
        "tiers": st.none() | st.lists(st.sampled_from(["llm", "student"]), unique=True),
        "boosts": st.none()
        | st.lists(st.fixed_dictionaries({"where": CLAUSES, "factor": st.sampled_from([0.5, 2])}), max_size=3),
        "pins": st.sampled_from([None, [], [{"item_id": "i01", "position": 2}, {"item_id": "i02", "position": 1}]]),
        "blocks": st.none() | st.lists(CLAUSES, max_size=3),
        "caps": st.sampled_from([None, [{"attribute": "categories", "most": 3}]]),
    },
)


@given(
    text=st.sampled_from(STYLES),
    surface=st.sampled_from(["cart", "new"]),
    edits=st.lists(FIELDS, min_size=1, max_size=4),
)
@example(text="cart.k = 4\n", surface="cart", edits=[{"deadline_ms": 1}, {"blocks": [{"key": "brand", "eq": "b"}]}])
def test_a_form_changes_its_fields_and_nothing_else(text: str, surface: str, edits: list[dict[str, Any]]) -> None:
    """In any style, edits change only the given fields; a surface of dotted keys may be rejected as a whole."""
    editor, changed = SurfacesEditor(Surfaces(None)), text
    wanted = tomllib.loads(text)
    for fields in edits:
        try:
            changed = editor.with_fields(changed, surface, fields)
        except InvalidRequest as error:
            assert (error.field, text) == ("text", "cart.k = 4\n")  # noqa: PT017 - any other error fails the test
            continue
        plain = wanted.setdefault(surface, {})
        for name, value in fields.items():
            table = plain if name in ("k", "deadline_ms", "tiers") else plain.setdefault("rules", {})
            table[name] = value
            if not value:
                del table[name]

    parsed = tomllib.loads(changed)
    for entry in (*wanted.values(), *parsed.values()):
        if not entry.get("rules", True):
            del entry["rules"]
    assert parsed == wanted
    assert changed.count("# who") == text.count("# who")
    form = editor.fields(changed, surface)
    assert {name: value for name, value in form.items() if value is not None} == {
        **{name: value for name, value in wanted[surface].items() if name != "rules"},
        **{name: value for name, value in wanted[surface].get("rules", {}).items() if name in form},
    }


@pytest.mark.parametrize(
    ("surface", "fields", "field"),
    [
        ("cart", {"filter": {}}, "fields.filter"),
        ("cart", {"k": 0}, "cart.k"),
        ("cart", {"tiers": ["gpt"]}, "cart.tiers[0]"),
        ("cart", {"pins": [{"item_id": "i01"}]}, "cart.rules.pins[0].position"),
        ("cart", {"caps": [None]}, "cart.rules.caps[0]"),
        ("", {"k": 3}, "surface"),
    ],
)
def test_a_form_that_would_make_a_wrong_text_is_refused(surface: str, fields: dict[str, Any], field: str) -> None:
    """The error has the field's path, as for a save; invalid text is rejected too."""
    editor = SurfacesEditor(Surfaces(None))
    with pytest.raises(InvalidRequest, check=lambda error: error.field == field):
        editor.with_fields(CART, surface, fields)
    with pytest.raises(InvalidRequest, match="text"):
        editor.with_fields("[cart", "cart", {"k": 3})


def test_a_boost_of_an_unknown_surface_or_by_a_bad_factor_is_refused() -> None:
    """The error names the field."""
    editor = SurfacesEditor(Surfaces(None))
    for surface, factor, field in (("crat", 2.0, "surface"), ("cart", 0.0, "factor"), ("cart", float("nan"), "factor")):
        with pytest.raises(InvalidRequest) as refused:
            editor.boosted(CART, surface, "i01", factor)
        assert refused.value.field == field


def _eq_of(boost: Boost) -> str:
    assert isinstance(boost.where, Condition)
    assert isinstance(boost.where.test, OneOf)
    (value,) = boost.where.test.values
    return str(value)
