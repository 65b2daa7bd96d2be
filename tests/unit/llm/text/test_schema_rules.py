"""Schemas that a grammar cannot express exactly are rewritten or rejected; a second validator checks drawn texts."""

import json
import re
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator, FormatChecker

from services.errors import InvalidRequest
from services.llm.text.guided_decoding import JsonGuide
from services.llm.text.tokenizer import TextTokenizer
from tests.support.engine.checkpoints import EOS_ID, build_tokenizer
from tests.support.pages import ROOT

TOKENIZER = TextTokenizer(build_tokenizer())
VOCAB_SIZE = build_tokenizer().get_vocab_size()
LONGEST = 400
FORMATS = FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
"""Python's checker accepts no offset in a time; the other formats need packages."""
BOUNDS = (0, 1, 2, 2.5, -2.5, -2, 0.1, 1e-7, 99, 100.5, -0.5, 12345.678, 2**53, 1e15)
OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
NODE = {**OBJECT, "properties": {"c": {"$ref": "#/$defs/n"}, "v": {"type": "null"}}}


@pytest.fixture(scope="module")
def guide() -> JsonGuide:
    return JsonGuide(TOKENIZER, VOCAB_SIZE, frozenset({EOS_ID}))


def draw(guide: JsonGuide, schema: dict[str, Any], seed: int) -> str | None:
    """Draw from the allowed tokens, with EOS half of the time if allowed; None if the text gets too long."""
    rng, written = np.random.default_rng(seed), b""
    mask = guide.compile(json.dumps(schema)).masks(1)[0]
    for _ in range(LONGEST):
        allowed = np.flatnonzero(np.unpackbits(mask.allowed().view(np.uint8), bitorder="little")[:VOCAB_SIZE])
        assert mask.failure is None, (mask.failure, written)
        token_id = EOS_ID if EOS_ID in allowed and rng.random() < 0.5 else int(rng.choice(allowed))
        mask.take(token_id)
        if token_id == EOS_ID:
            assert mask.is_complete
            assert mask.violation_of(written.decode()) is None
            return written.decode()
        written += TOKENIZER.bytes_of(token_id)
    return None


def satisfies(schema: dict[str, Any], text: str) -> bool:
    """Return whether a text is JSON that Python's validator accepts."""
    return Draft202012Validator(schema, format_checker=FORMATS).is_valid(json.loads(text))


def number(kind: str = "number", **bounds: float) -> dict[str, Any]:
    return {"type": kind, **bounds}


@pytest.mark.parametrize(
    "schema",
    [
        number(exclusiveMinimum=0, exclusiveMaximum=0.1),
        number(exclusiveMinimum=2, exclusiveMaximum=2.5),
        number(exclusiveMinimum=2, maximum=2.5),
        number(minimum=-2.5, exclusiveMaximum=-2),
        number(exclusiveMinimum=-0.5, exclusiveMaximum=0),
        number(exclusiveMinimum=0, maximum=1e-7),
        number(minimum=1, exclusiveMinimum=1, maximum=1.5),
        {"allOf": [number(exclusiveMinimum=0), {"maximum": 0.1}]},
        {"$defs": {"p": number(exclusiveMinimum=0)}, "$ref": "#/$defs/p", "maximum": 0.1},
        number("integer", exclusiveMinimum=0.5, exclusiveMaximum=3),
        number("integer", minimum=-(2**63), maximum=2**63 - 1),
        number("integer", minimum=2**53 + 1, maximum=2**53 + 9),
        {"type": ["integer", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 2},
        *({"type": "string", "format": name} for name in ("date", "time", "date-time", "email", "hostname", "ipv4")),
        *({"type": "string", "format": name} for name in ("ipv6", "uuid", "duration", "uri")),
        {"type": "string", "format": "date", "pattern": "^20"},
        {**OBJECT, "patternProperties": {"^a": {"type": "null"}}, "minProperties": 1},
        {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": number()}, "$ref": "#/$defs/a"},
        {"enum": [2**53, 10**16, 123456789012345680000]},
    ],
    ids=json.dumps,
)
def test_every_text_satisfies_a_schema_that_is_rewritten(guide: JsonGuide, schema: dict[str, Any]) -> None:
    """Bounds, white space and formats are enforced exactly."""
    texts = [text for seed in range(12) if (text := draw(guide, schema, seed)) is not None]

    assert texts
    assert [text for text in texts if not satisfies(schema, text)] == []


def test_white_space_in_a_pattern_is_ecmas(guide: JsonGuide) -> None:
    """`draw` checks this with our own validator, since Python and Rust define white space differently."""
    assert all(draw(guide, {"type": "string", "pattern": r"^[\s]\s[^\s]\S$"}, seed) for seed in range(20))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {**OBJECT, "properties": {"score": {}}, "patternProperties": {"^sc": {}}},
            "/patternProperties: '^sc' matches the declared property 'score'",
        ),
        (
            {
                "anyOf": [
                    {"type": "null"},
                    {"properties": {"a": {"properties": {"b": {}}, "patternProperties": {"": {}}}}},
                ]
            },
            "/anyOf/1/properties/a/patternProperties: '' matches",
        ),
        ({"enum": [1, 2**53 + 1]}, "/enum: 9007199254740993 cannot be written exactly"),
        (
            {"properties": {"a": {"const": {"b": [2**63]}}}},
            "/properties/a/const: 9223372036854775808 cannot be written exactly",
        ),
        ({"const": 10**400}, "cannot be written exactly"),
        (number("integer", minimum=10**19), "/minimum: 10000000000000000000 is beyond 64 bits"),
        (number(exclusiveMinimum=1, maximum=1), "Unsatisfiable"),
        ({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}, "recursive without end"),
        ({"$defs": {"n": {**NODE, "required": ["c"]}}, "$ref": "#/$defs/n"}, "recursive without end"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf: the alternatives may overlap"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"type": "string", "format": "regex"}, "Unknown format: regex"),
        ({"type": "string", "enum": [1]}, "Unsatisfiable"),
        ({**OBJECT, "required": ["a"]}, "Unsatisfiable"),
        ({"minimum": "a"}, '"a" is not of type "number"'),
        ({"$ref": "https://example.com/schema"}, "only references within the schema"),
        ({"$schema": "https://example.com/schema"}, "Unknown meta-schema"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_by_name(
    guide: JsonGuide, schema: dict[str, Any], problem: str
) -> None:
    """The schema is rejected before generation, with the keyword and its path."""
    with pytest.raises(InvalidRequest) as refusal:
        guide.compile(json.dumps(schema))

    assert refusal.value.field == "response_format"
    assert problem in refusal.value.problem
    assert "coerce_one_of" not in str(refusal.value)


ANY: list[Any] = [{"type": "null"}]
HELD: dict[str, dict[str, Any]] = {
    **{name: {"type": "object", name: {"a": {"type": "null"}}} for name in ("properties", "patternProperties")},
    **{name: {"type": "string", name: 1} for name in ("minLength", "maxLength")},
    **{name: {"type": "array", name: 1} for name in ("minItems", "maxItems")},
    **{name: {"type": "object", name: 1} for name in ("minProperties", "maxProperties")},
    **{name: number(**{name: 3}) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    **{name: {name: ANY} for name in ("anyOf", "oneOf", "allOf")},
    "multipleOf": number("integer", multipleOf=3),
    "type": {"type": ["null", "string"]},
    "enum": {"enum": [1, "a"]},
    "const": {"const": 1},
    "required": {**OBJECT, "properties": {"a": {}}, "required": ["a"]},
    "additionalProperties": {"type": "object", "additionalProperties": False},
    "items": {"type": "array", "items": {"type": "null"}},
    "prefixItems": {"type": "array", "prefixItems": ANY},
    "pattern": {"type": "string", "pattern": "^a+$"},
    "format": {"type": "string", "format": "date"},
    "$ref": {"$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"},
    "$defs": {"$defs": {"a": {"type": "null"}}, "type": "null"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "not": {"not": {"type": "null"}},
    "if": {"if": {"type": "null"}, "then": {}},
    "contains": {"type": "array", "contains": {}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
}


def test_the_page_lists_the_keywords(guide: JsonGuide) -> None:
    """Each keyword and format listed in docs/text.md compiles or is rejected as documented."""
    page = (ROOT / "docs" / "text.md").read_text()
    rows = {
        line.split("|")[1].strip(): set(re.findall(r"`([^`]+)`", line.split("|")[2]))
        for line in page.splitlines()
        if line.startswith(("| held", "| formats", "| refused"))
    }

    assert rows["held"] == HELD.keys()
    assert rows["refused"] == REFUSED.keys()
    for schema in (*HELD.values(), *({"type": "string", "format": name} for name in rows["formats"])):
        guide.compile(json.dumps(schema))
    for schema in REFUSED.values():
        with pytest.raises(InvalidRequest):
            guide.compile(json.dumps(schema))


def random_schema(random: Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of the keywords that docs/text.md lists, in any combination."""
    make = random.choice([*SCALARS, *(CONTAINERS if depth else ())])
    made: dict[str, Any] = make(random, depth)
    return made


def some(random: Random, **values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if random.random() < 0.5}


def random_number(random: Random, _: int) -> dict[str, Any]:
    """Return a number schema with bounds that may exclude each other."""
    low, high = sorted(random.choices(BOUNDS, k=2))
    sides = (random.choice(("minimum", "exclusiveMinimum")), random.choice(("maximum", "exclusiveMaximum")))
    step = some(random, multipleOf=random.choice((1, 2, 0.5, 3)))
    types = random.choice(("number", "integer", ["number", "null"], ["integer", "null"]))
    return {"type": types, **some(random, **{sides[0]: low, sides[1]: high}), **(step if random.random() < 0.3 else {})}


def random_string(random: Random, _: int) -> dict[str, Any]:
    """Return a string schema with lengths, a pattern or a format."""
    formats = ("date", "time", "date-time", "email", "hostname", "ipv4", "uuid")
    patterns = ("^[0-9]{2}x$", "b+", "^[^a-z]$", "^a|b$", "^[a-z][.].$", "^x*$")
    special = random.choice(({"pattern": random.choice(patterns)}, {"format": random.choice(formats)}, {}))
    return {
        "type": "string",
        **special,
        **some(random, minLength=random.randrange(3), maxLength=random.randrange(2, 9)),
    }


def random_enum(random: Random, _: int) -> dict[str, Any]:
    """Return an enum or const, perhaps with a type that some of the values lack."""
    values: list[Any] = [1, 2.5, "a", "ü\n", None, True, [1], {"k": [None]}]
    chosen = {"enum": random.sample(values, 3)} if random.random() < 0.7 else {"const": random.choice(values)}
    return {**chosen, **some(random, type=random.choice(("string", "number", "integer", "object")))}


def random_object(random: Random, depth: int) -> dict[str, Any]:
    """Return an object schema, open or closed, with required names that may be undeclared."""
    declared = {name: random_schema(random, depth - 1) for name in random.sample("abcd", random.randrange(4))}
    patterns = {"^x": random_schema(random, depth - 1)} if random.random() < 0.2 else {}
    others = random.choice((False, False, True, random_schema(random, 0)))
    required = random.sample("abx", random.randrange(3))
    return {
        "type": "object",
        **some(random, required=required),
        "properties": declared,
        "additionalProperties": others,
        **({"patternProperties": patterns} if patterns else {}),
    }


def random_array(random: Random, depth: int) -> dict[str, Any]:
    """Return an array schema."""
    first = {"prefixItems": [random_schema(random, depth - 1)]} if random.random() < 0.3 else {}
    counts = some(random, minItems=random.randrange(3), maxItems=random.randrange(1, 4))
    return {"type": "array", "items": random_schema(random, depth - 1), **first, **counts}


def random_combination(random: Random, depth: int) -> dict[str, Any]:
    """Return a combination of two schemas, perhaps with additional keywords."""
    parts = [random_schema(random, depth - 1) for _ in range(2)]
    beside = random_schema(random, 0) if random.random() < 0.3 else {}
    return {**beside, random.choice(("anyOf", "anyOf", "oneOf", "allOf")): parts}


SCALARS = (random_number, random_string, random_enum)
CONTAINERS = (random_object, random_array, random_combination)


@pytest.mark.parametrize("num_schemas", [60, pytest.param(3_000, marks=[pytest.mark.grid, pytest.mark.timeout(7_200)])])
def test_random_schemas_are_satisfied_or_refused(guide: JsonGuide, num_schemas: int) -> None:
    """A completed text satisfies its schema by both validators."""
    random, num_texts = Random(36), 0
    for _ in range(num_schemas):
        schema = random_schema(random)
        for seed in range(3):
            try:
                text = draw(guide, schema, seed)
            except InvalidRequest:
                break
            assert text is None or satisfies(schema, text), (schema, text)
            num_texts += text is not None

    assert num_texts > num_schemas


@pytest.mark.parametrize("text", ["1e5", "-1.5E-7", "1" * 5_000, "1e999999999999999999999", "1e-" + "9" * 5_000, "1.0"])
def test_any_number_of_json_can_be_validated(guide: JsonGuide, text: str) -> None:
    """Exponents and digits may exceed Python's numbers."""
    assert guide.compile('{"type": "number"}').masks(1)[0].violation_of(text) is None
