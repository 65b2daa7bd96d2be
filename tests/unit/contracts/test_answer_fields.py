"""Each door and the client have exactly the response fields of the contract."""

from dataclasses import fields

import pytest

from services.contracts import recommend_pb2 as pb
from services.contracts.assignment import Assigned, SurfaceAssignment
from services.contracts.events import Recorded
from services.contracts.recommend import Recommendation, ScoredItem
from services.gateway.rest import schema
from services.gateway.rest.assignment import AssignedBody, SurfaceAssignmentBody
from tailrace_client import calls


@pytest.mark.parametrize(
    ("contract", "rest", "grpc", "client", "at_the_doors", "in_the_client"),
    [
        (
            Recommendation,
            schema.RecommendationBody,
            pb.RecommendResponse,
            calls.Recommendation,
            {"rationale_reason"},  # the contract's rationale holds both
            {"num_attempts"},
        ),
        (SurfaceAssignment, SurfaceAssignmentBody, pb.SurfaceAssignment, calls.SurfaceAssignment, set(), set()),
        (Assigned, AssignedBody, pb.AssignResponse, calls.Assigned, set(), {"num_attempts"}),
        (ScoredItem, schema.ItemBody, pb.ScoredItem, calls.Item, set(), set()),
        (Recorded, schema.RecordedBody, pb.RecordEventsResponse, calls.Recorded, set(), {"num_attempts"}),
    ],
)
def test_every_definition_of_an_answer_has_the_contract_s_fields(
    contract: type, rest: type, grpc: type, client: type, at_the_doors: set[str], in_the_client: set[str]
) -> None:
    """A field added to one definition must be added to all definitions."""
    own = {one.name for one in fields(contract)}
    of_client = {one.name for one in fields(client)} - in_the_client

    assert set(rest.model_fields) == own | at_the_doors
    assert {one.name for one in grpc.DESCRIPTOR.fields} == own | at_the_doors
    assert own <= of_client <= own | at_the_doors
