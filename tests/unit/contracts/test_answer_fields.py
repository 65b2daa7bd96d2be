"""The contract, protobuf and the client have the same fields."""

from dataclasses import fields

import pytest
from google.protobuf.message import Message as Protobuf

from services.contracts import recommend_pb2 as pb
from services.contracts.answers import ErrorDetail
from services.contracts.assignment import AssignResponse, SurfaceAssignment
from services.contracts.erasure import ErasedStore, ReceiptBody, Remaining
from services.contracts.events import EventBody, RecordEventsResponse
from services.contracts.items import ItemOutcome, StatedItemBody
from services.contracts.message import Message
from services.contracts.recommend import Filters, Recommendation, RecommendBody, ScoredItem
from services.contracts.rules import Boost, Cap, Freshness, Pin, Rules
from tailrace_client import calls
from tailrace_client.items import CatalogueItem


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
        (AssignResponse, pb.AssignResponse, calls.Assigned),
        (SurfaceAssignment, pb.SurfaceAssignment, calls.SurfaceAssignment),
        (EventBody, pb.Interaction, calls.Event),
        (RecordEventsResponse, pb.RecordEventsResponse, calls.Recorded),
        (StatedItemBody, pb.CatalogueItem, CatalogueItem),
        (ItemOutcome, pb.ItemOutcome, None),
        (ReceiptBody, pb.ErasureReceipt, calls.ErasureReceipt),
        (ErasedStore, pb.ErasedStore, None),
        (Remaining, pb.Remaining, None),
    ],
)
def test_a_message_has_the_contract_s_fields(
    contract: type[Message], protobuf: type[Protobuf], client: type | None
) -> None:
    """A field of the contract is a field of the protobuf message, and of the client's type."""
    own = set(contract.__struct_encode_fields__)

    assert {field.name for field in protobuf.DESCRIPTOR.fields} == own
    if client is not None:
        assert {field.name for field in fields(client)} - {"num_attempts"} == own
