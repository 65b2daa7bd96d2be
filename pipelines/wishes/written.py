"""Asks a larger model, behind the OpenAI API, for more phrasings of wishes.

Its answers are data: a line is kept if it is short and has the slots of a shipped phrasing of its kind.
"""

import string
from collections.abc import Mapping, Sequence

import httpx
import structlog

from pipelines.wishes.generate import Phrasings

log = structlog.get_logger()

_MAX_CHARS, _TIMEOUT_S = 160, 120.0
_NOT_WRITTEN = frozenset({"title"})
_ASK = (
    "Write {num} different ways in which people ask a recommender for items, one per line, without numbers. Vary "
    "length, tone and grammar. Keep the words in braces as they are; they are replaced later. Examples:\n{lines}"
)
_MARKS = " \t-*•\"'"


def with_written(shipped: Phrasings, num: int, url: str, key: str = "", model: str = "") -> Phrasings:
    """Return the shipped phrasings, and up to `num` phrasings a kind by the model at `url`; kinds of one line only.

    A kind keeps its shipped phrasings if the server fails; a warning says so.
    """
    phrasings = {kind: list(own) for kind, own in shipped.items()}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=_TIMEOUT_S, trust_env=False) as http:
        for kind, own in shipped.items():
            if kind in _NOT_WRITTEN or any("\n" in line for line in own):
                continue
            try:
                model = model or http.get("/models").raise_for_status().json()["data"][0]["id"]
                written = _asked(http, model, own, num)
            except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                log.warning("phrasings_not_written", kind=kind, error=type(error).__name__)
                continue
            phrasings[kind] += [line for line in dict.fromkeys(written) if is_like(line, own)][:num]
    return phrasings


def _asked(http: httpx.Client, model: str, own: Sequence[str], num: int) -> list[str]:
    """Return the lines of the model's answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _ASK.format(num=num, lines="\n".join(own))}],
        "max_tokens": 40 * num,
        "temperature": 0.9,
    }
    answer = http.post("/chat/completions", json=body).raise_for_status().json()
    text = str(answer["choices"][0]["message"]["content"])
    return [line.lstrip("0123456789.)").strip(_MARKS) for line in map(str.strip, text.splitlines())]


def is_like(line: str, own: Sequence[str]) -> bool:
    """Whether a line has just the slots of one of these phrasings, is new, and is short."""
    slots = slots_of(line)
    return bool(slots) and len(line) <= _MAX_CHARS and line not in own and slots in map(slots_of, own)


def slots_of(text: str) -> Mapping[str, int] | None:
    """Return how often each slot occurs in a phrasing; None if it cannot be filled by names only."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError:
        return None
    names = [name for _, name, form, conversion in parts if name is not None and not form and not conversion]
    if len(names) != sum(name is not None for _, name, _, _ in parts) or "{{" in text or "}}" in text:
        return None
    return {name: names.count(name) for name in sorted(names)}
