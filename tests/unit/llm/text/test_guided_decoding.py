"""Whatever is drawn from a guided mask is JSON that the schema allows; a bad schema is the caller's error."""

import json

import numpy as np
import pytest

from services.errors import InvalidRequest
from services.llm.text.guided_decoding import JsonGuide
from services.llm.text.tokenizer import TextTokenizer
from tests.support.checkpoints import EOS_ID, build_tokenizer

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


@pytest.fixture(scope="module")
def guide() -> JsonGuide:
    """A guide for a model with more tokens than its tokenizer."""
    return JsonGuide(TOKENIZER, VOCAB_SIZE, frozenset({EOS_ID}))


def draw(guide: JsonGuide, schema: str, seed: int) -> str:
    """Write by drawing uniformly from what may come, until the end token."""
    rng = np.random.default_rng(seed)
    mask, written = guide.masks(schema, 1)[0], b""
    while True:
        bits = np.unpackbits(mask.allowed().view(np.uint8), bitorder="little")
        token_id = int(rng.choice(np.flatnonzero(bits[:VOCAB_SIZE])))
        mask.take(token_id)
        if token_id == EOS_ID:
            return written.decode()
        written += TOKENIZER.bytes_of(token_id)


@pytest.mark.parametrize("seed", range(20))
def test_every_draw_satisfies_the_schema(guide, seed: int) -> None:
    """Uniform draws give an object of the right form."""
    person = json.loads(draw(guide, json.dumps(PERSON), seed))

    assert list(person) == ["name", "age", "kind", "tags"]
    assert len(person["name"]) <= 12
    assert 1 <= person["age"] <= 99
    assert person["kind"] in {"river", "sea"}
    assert len(person["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in person["tags"])


def test_choices_do_not_share_their_place(guide) -> None:
    """Each choice's mask goes its own way."""
    first, second = guide.masks('{"type": "boolean"}', 2)
    begin = second.allowed().copy()

    first.take(TOKENIZER.encode("t", with_special_tokens=False)[0])

    assert not np.array_equal(first.allowed(), begin)
    assert np.array_equal(second.allowed(), begin)
    assert len(begin) == -(-VOCAB_SIZE // 32)


@pytest.mark.parametrize(
    "schema", ["{", "[1]", '{"type": "nothing"}', '{"$ref": "#/absent"}', '{"type": "string", "pattern": "("}']
)
def test_a_bad_schema_names_the_field(guide, schema: str) -> None:
    """What is no schema is refused by the name that callers know."""
    with pytest.raises(InvalidRequest) as refusal:
        guide.masks(schema, 1)

    assert refusal.value.field == "response_format"


def test_a_bad_pattern_says_what_is_wrong_with_it(guide) -> None:
    """Not only that something is: the reason stands on a later line of what the library says."""
    with pytest.raises(InvalidRequest, match="unclosed group"):
        guide.masks('{"type": "string", "pattern": "("}', 1)


def test_a_token_against_the_mask_is_a_failure_and_no_crash(guide) -> None:
    """A matcher that cannot go on lets everything through and says so."""
    mask = guide.masks('{"type": "boolean"}', 1)[0]

    mask.take(TOKENIZER.encode("x", with_special_tokens=False)[0])

    assert mask.failure
    assert (mask.allowed() == -1).all()
