"""A recommendation request validates its own values."""

import json
from typing import Any

import pytest

from services.contracts.message import convert, decode
from services.contracts.recommend import RecommendBody, RecommendRequest
from services.errors import InvalidRequest


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"user_id": None}, "user_id"),
        ({"user_id": "x" * 257}, "user_id"),
        ({"user_id": "a\x00"}, "user_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 257}, "session_id"),
        ({"user_id": None, "recent_item_ids": ("i",), "session_id": "a\x00"}, "session_id"),
        ({"request_id": ""}, "request_id"),
        ({"k": 0}, "k"),
        ({"k": 2_001}, "k"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": 60_001}, "deadline_ms"),
        ({"recent_item_ids": ("",)}, "recent_item_ids[0]"),
        ({"filters": {"categories": ()}}, "filters.categories"),
        ({"filters": {"allowed_item_ids": ("a",) * 2_001}}, "filters.allowed_item_ids"),
    ],
)
def test_an_invalid_request_is_refused(fields: dict[str, Any], field: str) -> None:
    """The error names the field, for plain values and for JSON text."""
    sent = {"request_id": "r", "user_id": "u", **fields}

    with pytest.raises(InvalidRequest, check=lambda error: error.field == field):
        RecommendRequest.of(convert(RecommendBody, sent), "r", None)
    with pytest.raises(InvalidRequest, check=lambda error: error.field == field):
        RecommendRequest.of(decode(RecommendBody, json.dumps(sent).encode()), "r", None)
