"""A text drawn under a guided mask is JSON that the schema allows; an invalid schema is the caller's error."""

import json

import numpy as np
import pytest

from services.errors import InvalidRequest
from services.llm.text.guided_decoding import JsonGuide
from services.llm.text.tokenizer import TextTokenizer
from tests.support.engine.checkpoints import EOS_ID, build_tokenizer

TOKENIZER = TextTokenizer(build_tokenizer())
VOCAB_SIZE = build_tokenizer().get_vocab_size() + 5
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["river", "sea"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def alternatives(num_parts: int, num_each: int) -> dict[str, object]:
    """Return a conjunction of parts with alternatives, which expands to their product."""
    parts = [[{"properties": {f"p{part}_{option}": {}}} for option in range(num_each)] for part in range(num_parts)]
    return {"allOf": [{"anyOf": [{"type": "object", **schema} for schema in part]} for part in parts]}


@pytest.fixture(scope="module")
def guide() -> JsonGuide:
    """A guide for a model with more tokens than its tokenizer."""
    return JsonGuide(TOKENIZER, VOCAB_SIZE, frozenset({EOS_ID}))


def draw(guide: JsonGuide, schema: str, seed: int) -> str:
    """Draw uniformly from the allowed tokens until the EOS token."""
    rng = np.random.default_rng(seed)
    mask, written = guide.compile(schema).masks(1)[0], b""
    while True:
        bits = np.unpackbits(mask.allowed().view(np.uint8), bitorder="little")
        token_id = int(rng.choice(np.flatnonzero(bits[:VOCAB_SIZE])))
        mask.take(token_id)
        if token_id == EOS_ID:
            return written.decode()
        written += TOKENIZER.bytes_of(token_id)


def test_every_draw_satisfies_the_schema(guide) -> None:
    """Uniform draws produce objects that match the schema."""
    for seed in range(10):
        person = json.loads(draw(guide, json.dumps(PERSON), seed))

        assert list(person) == ["name", "age", "kind", "tags"]
        assert person["kind"] in {"river", "sea"}
        assert (len(person["name"]) <= 12, 1 <= person["age"] <= 99, len(person["tags"]) <= 3) == (True, True, True)
        assert all(isinstance(tag, bool) for tag in person["tags"])


def test_choices_do_not_share_their_place(guide) -> None:
    """Each choice has its own mask."""
    first, second = guide.compile('{"type": "boolean"}').masks(2)
    begin = second.allowed().copy()

    first.take(TOKENIZER.encode("t", with_special_tokens=False)[0])

    assert not np.array_equal(first.allowed(), begin)
    assert np.array_equal(second.allowed(), begin)
    assert len(begin) == -(-VOCAB_SIZE // 32)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "."),
        ("[1]", "."),
        ('{"type": "nothing"}', "."),
        ('{"$ref": "#/absent"}', "."),
        ('{"type": "string", "pattern": "("}', 'is not a "regex"'),
        (json.dumps(alternatives(6, 4)), "grammar size .*10000"),
    ],
)
def test_a_bad_schema_names_the_field(guide, schema: str, reason: str) -> None:
    """An invalid schema, a bad pattern and an oversized grammar are rejected with the request's field."""
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        guide.compile(schema)

    assert refusal.value.field == "response_format"


def test_a_token_that_the_mask_forbids_is_a_failure(guide) -> None:
    """A violated mask allows every token from then on, and records the failure."""
    mask = guide.compile('{"type": "boolean"}').masks(1)[0]

    mask.take(TOKENIZER.encode("x", with_special_tokens=False)[0])

    assert mask.failure
    assert (mask.allowed() == -1).all()
