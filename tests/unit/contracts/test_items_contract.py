"""Item states survive encoding, invalid fields are named, and patches follow RFC 7396."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.items import RESERVED_NAMES, PutItemsBody, decode_item, item_from
from services.contracts.message import convert
from services.errors import InvalidRequest

WORDS = st.text(
    st.characters(min_codepoint=33, max_codepoint=400, categories=("L", "N", "P", "S")), min_size=1, max_size=8
)
VALUES = st.one_of(WORDS, st.lists(WORDS, min_size=1, max_size=3), st.floats(-1e9, 1e9), st.booleans())
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "title": WORDS,
        "categories": st.lists(WORDS, max_size=3),
        "attributes": st.dictionaries(WORDS.filter(lambda name: name not in RESERVED_NAMES), VALUES, max_size=4),
        "available": st.booleans(),
        "published_ms": st.integers(10**10, 10**13),
        "expires_ms": st.integers(10**10, 10**13),
        "value": st.floats(0, 1e6),
    },
)


@given(FIELDS)
def test_what_is_encoded_comes_back(fields: dict[str, Any]) -> None:
    """A state survives encoding as a topic record and as plain values."""
    state = item_from("i1", fields)

    assert decode_item(state.key, state.encode()) == ("i1", state)
    assert item_from("i1", state.fields()) == state


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396, section 2, verbatim."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = merged(target.get(name), value)
    return target


PATCHES = FIELDS.flatmap(
    lambda fields: st.sets(st.sampled_from(["title", "categories", "attributes", "value", "available"])).map(
        lambda cleared: fields | dict.fromkeys(cleared)
    )
)


@given(FIELDS, PATCHES, st.sets(st.sampled_from(["a", "b"])))
def test_a_patch_is_a_merge_patch(fields: dict[str, Any], patch: dict[str, Any], taken: set[str]) -> None:
    """The state after a patch equals the state of the merged document; attributes are merged by name."""
    fields["attributes"] = {"a": "one", "b": True} | fields.get("attributes", {})
    if isinstance(patch.get("attributes"), dict):
        patch["attributes"] |= dict.fromkeys(taken)
    state = item_from("i1", fields)

    assert state.patched(patch) == item_from("i1", merged(fields, patch))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"availble": True}, "availble"),
        ({"available": "yes"}, "available"),
        ({"title": ""}, "title"),
        ({"title": "a\nb"}, "title"),
        ({"title": "x" * 1_025}, "title"),
        ({"categories": "Comedy"}, "categories"),
        ({"categories": ["a", 5]}, "categories[1]"),
        ({"categories": ["a"] * 65}, "categories"),
        ({"attributes": []}, "attributes"),
        ({"attributes": {"value": 1}}, "attributes.value"),
        ({"attributes": {"a": None}}, "attributes.a"),
        ({"attributes": {"a": []}}, "attributes.a"),
        ({"attributes": {"a": ["b", ""]}}, "attributes.a[1]"),
        ({"attributes": {"a": {"b": 1}}}, "attributes.a"),
        ({"attributes": {"a": 10**400}}, "attributes.a"),
        ({"attributes": {str(number): 1 for number in range(65)}}, "attributes"),
        ({"published_ms": 1_700_000_000}, "published_ms"),
        ({"expires_ms": 1.5e12}, "expires_ms"),
        ({"expires_ms": True}, "expires_ms"),
        ({"value": "1"}, "value"),
        ({"value": float("nan")}, "value"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    """The error names the field, its position within a list or an object, and a fix."""
    with pytest.raises(InvalidRequest, check=lambda error: error.field == field and error.fix != ""):
        item_from("i1", fields)


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        (None, b"{}", "key"),
        (b"", b"{}", "key"),
        (b"\xff", b"{}", "key"),
        (b"i1", b"{", "value"),
        (b"i1", b"[]", "value"),
        (b"i1", b"\xff", "value"),
        (b"i1", b'{"item_id":"i2"}', "item_id"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(key: bytes | None, value: bytes, field: str) -> None:
    """Keys and values are checked separately; a tombstone is a deletion."""
    with pytest.raises(InvalidRequest, check=lambda error: error.field == field):
        decode_item(key, value)
    assert decode_item(b"i1", None) == ("i1", None)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [({"item_id": 5}, "not a string"), ({"item_id": None}, "not a string"), ({"item_id": ""}, "empty"), ({}, "empty")],
)
def test_an_id_that_is_no_string_is_named_as_such(entry: dict[str, Any], problem: str) -> None:
    """Numeric ids are a common mistake; only this entry of the request is rejected."""
    sent = convert(PutItemsBody, {"items": [entry | {"title": "A"}, {"item_id": "b"}]})

    with pytest.raises(InvalidRequest) as refused:
        item_from(*sent.drafts[0])

    assert (refused.value.field, refused.value.problem) == ("item_id", problem)
    assert item_from(*sent.drafts[1]).item_id == "b"
