"""Bytes as from a hostile or broken sender, from a seed: the same seed gives the same bytes. Pure."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Maker = Callable[[Random], bytes]

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, 1e308, float("inf"), float("nan")),
    *(
        "",
        " ",
        "x",
        "0",
        "-1",
        "\x00",
        "\n",
        "\ud800",
        "\u202e",
        "😀" * 70,
        "x" * 300,
        "1e5",
        "trk_",
        "../../etc/passwd",
    ),
    *([], {}, [[]], [None], [0], [""], {"": None}, {"a": {"b": []}}, [[[[[[]]]]]], "{{ 1 }}", "{% for x in y %}"),
)


def mutations_of(*documents: bytes) -> Maker:
    """Return a maker of bytes that differ from a well-formed document in some positions; sometimes pure noise."""

    def make(random: Random) -> bytes:
        if random.random() < 0.05:
            return random.randbytes(random.randrange(64))
        body = bytearray(random.choice(documents))
        for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
            _mutate(body, random)
        return bytes(body)

    return make


def _mutate(body: bytearray, random: Random) -> None:
    """Change, remove, add or repeat some bytes."""
    start = random.randrange(len(body) + 1)
    end = min(len(body), start + random.choice((1, 1, 2, 4, 8, 32)))
    match random.randrange(6):
        case 0:
            body[start:end] = random.randbytes(end - start)
        case 1:
            del body[start:end]
        case 2:
            body[start:start] = random.randbytes(random.randrange(1, 9))
        case 3:
            body[start:start] = body[start:end]
        case 4:
            body[start:end] = random.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * (end - start)
        case _:
            del body[start:]


def json_of(names: Sequence[str], *documents: dict[str, Any]) -> Maker:
    """Return a maker of JSON: well-formed documents with some values, also nested, replaced by odd values."""
    as_bytes = mutations_of(*(json.dumps(document).encode() for document in documents))

    def make(random: Random) -> bytes:
        """Build a document; every fourth is invalid JSON."""
        if random.random() < 0.25:
            return as_bytes(random)
        sent: Any = json.loads(json.dumps(random.choice(documents)))
        for _ in range(random.choice((1, 1, 2, 5))):
            sent[random.choice((*names, "\ud800"))] = _odd(random, sent)
        if random.random() < 0.1:
            sent = random.choice((*ODD_VALUES, [sent], {"events": sent}, [sent] * 3))
        text = json.dumps(sent, ensure_ascii=random.random() < 0.5)
        if random.random() < 0.01:
            text = random.choice(("[", '{"a":', '{"events":[')) * random.choice((100, 5_000, 100_000))
        return text.encode(errors="surrogatepass")

    return make


def _odd(random: Random, sent: Any) -> Any:
    """Return an odd value, perhaps within a list or an object, or the value of another field."""
    value = random.choice((random.choice(ODD_VALUES), random.choice(list(sent.values()) or [None])))
    match random.randrange(6):
        case 0:
            return [value] * random.choice((1, 2, 70))
        case 1:
            return {str(random.choice(ODD_VALUES)): value}
        case _:
            return value
