"""The contract, protobuf and the client have the same fields."""

from dataclasses import fields

import pytest
from google.protobuf.message import Message as Protobuf

from services.contracts import recommend_pb2 as pb
from services.contracts.answers import ErrorDetail
from services.contracts.message import Message
from services.contracts.recommend import Filters, Recommendation, RecommendBody, ScoredItem
from services.contracts.rules import Boost, Cap, Freshness, Pin, Rules
from tailrace_client import calls


@pytest.mark.parametrize(
    ("contract", "protobuf", "client"),
    [
        (Recommendation, pb.RecommendResponse, calls.Recommendation),
        (ScoredItem, pb.ScoredItem, calls.Item),
        (ErrorDetail, pb.Error, None),
        (RecommendBody, pb.RecommendRequest, None),
        (Filters, pb.Filters, None),
        (Rules, pb.Rules, None),
        (Boost, pb.Rules.Boost, None),
        (Pin, pb.Rules.Pin, None),
        (Cap, pb.Rules.Cap, None),
        (Freshness, pb.Rules.Freshness, None),
    ],
)
def test_a_message_has_the_contract_s_fields(
    contract: type[Message], protobuf: type[Protobuf], client: type | None
) -> None:
    """A field of the contract is a field of the protobuf message, and of the client's type."""
    own = set(contract.__struct_encode_fields__)

    assert {one.name for one in protobuf.DESCRIPTOR.fields} == own
    if client is not None:
        assert {one.name for one in fields(client)} - {"num_attempts"} == own
