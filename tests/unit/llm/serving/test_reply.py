"""Refusals carry every deliberate error of a replica to the caller."""

import pickle

import pytest

from services.errors import (
    BundleMismatch,
    BundleNotFound,
    CheckpointError,
    ContextTooLong,
    DeadlineExceeded,
    DependencyUnavailable,
    InvalidRequest,
    ModelLoading,
    NotFound,
    Overloaded,
    SchemaViolated,
)
from services.llm.serving.reply import TEXT, refusal_of


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("the LLM", 0.25),
        DeadlineExceeded("llm"),
        BundleMismatch("v1", "v2"),
        BundleNotFound("none"),
        ModelLoading("mail"),
        InvalidRequest("k", "0 is out of range", "send 1"),
        ContextTooLong("prompt", "9 tokens long", "send at most 8"),
        NotFound("no such model", "ask for another"),
        DependencyUnavailable("the LLM", 1.0),
        SchemaViolated("/lr: 0 is too small"),
    ],
)
def test_an_error_survives_the_trip(error) -> None:
    """A pickled refusal becomes an error of the same class with the same details."""
    back = pickle.loads(pickle.dumps(refusal_of(error))).as_error()

    assert type(back) is type(error)
    for fact in ("retry_after_s", "wanted", "loaded", "name", "field", "problem", "fix"):
        assert getattr(back, fact, None) == getattr(error, fact, None)


def test_a_refusal_names_the_part_that_refused() -> None:
    """The error names the LLM or the text model; unexpected errors are hidden from the caller."""
    refusal = refusal_of(Overloaded("the engine's queue", 0.25))

    assert "the LLM is overloaded" in str(refusal.as_error())
    assert "the text model is overloaded" in str(refusal.as_error(TEXT))
    assert refusal_of(DeadlineExceeded("x")).as_error(TEXT).problem.startswith("text:")
    assert isinstance(refusal_of(CheckpointError("?")).as_error(), DependencyUnavailable)
