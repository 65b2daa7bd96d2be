"""Maps SIDs to tokens of a checkpoint: each level is a range of the vocabulary."""

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from models.catalogue import Catalogue
from pipelines.foreign.index import ItemIndex
from pipelines.foreign.refused import Refused

SIDS = "sids.json"
"""File of a bundle with own codes from an index: the name of each code by level."""
_MAX_SHARED = 64
"""Items of one code; a list of ten items could then be a single code."""
_PATTERNS: Sequence[Callable[[int, int, int], str]] = (
    lambda level, code, _before: f"<{chr(97 + level)}_{code}>",
    lambda level, code, _before: f"<s_{chr(97 + level)}_{code}>",
    lambda _level, code, before: f"C{before + code}",
    lambda _level, code, before: f"<|sid_{before + code}|>",
)
"""Names of SID tokens in public recommenders, by level, code, and number of codes of the levels before."""


_QWENS = {"qwen2", "qwen3"}
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of transformers' tokenizer class of these families."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemCodeTable:
    """Items and their codes; code c at level l is the token `first_tokens[l]` + c. None: our own decoder's tokens."""

    item_ids: tuple[str, ...]
    codes: np.ndarray
    level_sizes: tuple[int, ...]
    first_tokens: tuple[int, ...] | None
    warnings: tuple[str, ...] = ()
    level_names: tuple[tuple[str, ...], ...] = ()
    """Of own codes: the name of each code by level, empty for a number that no item has."""
    catalogue: Catalogue | None = None
    """A catalogue that stays whole, with items that the data lacks."""

    @property
    def key(self) -> str:
        """Hash of items, codes and levels."""
        digest = hashlib.sha256(json.dumps([self.item_ids, self.level_sizes, self.first_tokens]).encode())
        digest.update(self.codes.tobytes())
        return digest.hexdigest()[:16]

    def of(self, item_ids: Sequence[str]) -> np.ndarray:
        """Return the row (N,) of each item in `codes`, -1 for an item without a code."""
        rows = {item_id: row for row, item_id in enumerate(self.item_ids)}
        return np.array([rows.get(item_id, -1) for item_id in item_ids], dtype=np.int64)


def codes_in(catalogue: Catalogue) -> ItemCodeTable:
    """Return the codes of a bundle's catalogue, which stays as it is."""
    return ItemCodeTable(
        catalogue.item_ids, catalogue.codes, catalogue.level_sizes, catalogue.first_tokens, catalogue=catalogue
    )


def resolve(index: ItemIndex, tokenizer: Tokenizer, vocab_size: int) -> ItemCodeTable:
    """Return the codes of an index in a checkpoint's vocabulary. Raises Refused."""
    tokens_ID = np.array(list(_token_ids(index, tokenizer)), dtype=np.int64)
    item_ids = tuple(index.sids)
    over = np.argwhere((tokens_ID >= vocab_size) | (tokens_ID < 0))
    if len(over):
        row, level = over[0]
        problem = f"token {tokens_ID[row, level]} is outside the weights' vocabulary of {vocab_size}"
        fix = "resize the embeddings to the tokenizer before training (resize_token_embeddings)"
        raise Refused(index.file, f"item {item_ids[row]}", problem, fix)
    first, last = tokens_ID.min(axis=0), tokens_ID.max(axis=0)
    warnings = tuple(_warnings(tokens_ID))
    codes = (tokens_ID - first).astype(np.int32)
    return ItemCodeTable(item_ids, codes, tuple((last - first + 1).tolist()), tuple(first.tolist()), warnings)


def own_codes(index: ItemIndex) -> ItemCodeTable:
    """Return the codes of an index without a checkpoint, numbered from 0 at each level; our own decoder learns them."""
    sids = np.array([list(map(str, sid)) for sid in index.sids.values()])
    levels = [np.unique(names, return_inverse=True) for names in sids.T]
    codes_ID = np.stack([codes for _, codes in levels], axis=1).astype(np.int32)
    _refuse_crowded(index, codes_ID)
    names = tuple(tuple(names.tolist()) for names, _ in levels)
    return ItemCodeTable(tuple(index.sids), codes_ID, tuple(map(len, names)), None, level_names=names)


def codes_of_new(folder: Path, catalogue: Catalogue, index: ItemIndex, item_ids: Sequence[str]) -> np.ndarray:
    """Return the codes (N, depth) of new items of a bundle whose codes came from an index. Raises Refused."""
    missing = next((item_id for item_id in item_ids if item_id not in index.sids), None)
    if missing is not None:
        raise Refused(index.file, f"item {missing}", "no SID", "add it to the index, or remove it from the items")
    new = replace(index, sids={item_id: index.sids[item_id] for item_id in item_ids})
    if new.depth != catalogue.depth:
        problem = f"{new.depth} tokens, the bundle's codes have {catalogue.depth}"
        raise Refused(index.file, f"item {item_ids[0]}", problem, "give the index of the same training")
    if catalogue.first_tokens is not None:
        tokens_ID = np.array(_token_ids(new, read_tokenizer(folder / "decoder")), dtype=np.int64)
        codes_ID = tokens_ID - np.array(catalogue.first_tokens)
        codes_ID[codes_ID >= np.array(catalogue.level_sizes)] = -1
    else:
        levels = json.loads((folder / SIDS).read_text())
        known = [{name: code for code, name in enumerate(names)} for names in levels]
        rows = [[known[level].get(str(name), -1) for level, name in enumerate(sid)] for sid in new.sids.values()]
        codes_ID = np.array(rows, dtype=np.int64)
    unknown = np.argwhere(codes_ID < 0)
    if len(unknown):
        row, level = unknown[0]
        problem = f"{new.sids[item_ids[row]][level]} is unknown at level {level + 1} of the bundle"
        raise Refused(index.file, f"item {item_ids[row]}", problem, "train with the new index, or give a known code")
    known_codes: np.ndarray = codes_ID.astype(np.int32)
    return known_codes


def describe_shared(codes: np.ndarray) -> str:
    """Return a sentence on the items that share their code with another item."""
    _, counts = np.unique(codes, axis=0, return_counts=True)
    if counts.max(initial=0) < 2:
        return "every item has its own code"
    return f"{int(counts[counts > 1].sum())} items share a code, at most {counts.max()} one code"


def _token_ids(index: ItemIndex, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    if index.kind == "ids":
        rows = [tuple(int(token) for token in sid) for sid in index.sids.values()]
    else:
        names = _names(index, tokenizer)
        vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        rows = [
            tuple(_token(index, item_id, name, tokenizer, vocabulary, added) for name in sid)
            for item_id, sid in names.items()
        ]
    _refuse_crowded(index, np.array(rows))
    return rows


def _names(index: ItemIndex, tokenizer: Tokenizer) -> Mapping[str, tuple[str, ...]]:
    """Return each SID as names of tokens. Code numbers get the first pattern whose tokens the checkpoint has."""
    if index.kind == "names":
        return {item_id: tuple(map(str, sid)) for item_id, sid in index.sids.items()}
    codes = {item_id: tuple(map(int, sid)) for item_id, sid in index.sids.items()}
    used = tuple(1 + max(level) for level in zip(*codes.values(), strict=True))
    first = next(iter(codes.values()))
    for pattern in _PATTERNS:
        sizes = index.sizes or (_level_sizes(pattern, tokenizer, index.depth) if _is_numbered(pattern) else used)
        before = tuple(accumulate(sizes, initial=0))
        if all(size >= least for size, least in zip(sizes, used, strict=True)) and all(
            tokenizer.token_to_id(pattern(level, code, before[level])) is not None for level, code in enumerate(first)
        ):
            return {
                item_id: tuple(pattern(level, code, before[level]) for level, code in enumerate(sid))
                for item_id, sid in codes.items()
            }
    known = ", ".join(pattern(0, 0, 0) for pattern in _PATTERNS)
    fix = f"name the tokens in the index, such as {known}"
    raise Refused(index.file, "", "code numbers, and tokenizer.json has no tokens of a known pattern", fix)


def _is_numbered(pattern: Callable[[int, int, int], str]) -> bool:
    """Whether a pattern numbers the tokens of all levels in one row."""
    return pattern(0, 1, 1) == pattern(0, 2, 0)


def _level_sizes(pattern: Callable[[int, int, int], str], tokenizer: Tokenizer, depth: int) -> tuple[int, ...]:
    """Return the equal sizes of the levels by the checkpoint's own tokens: the items may not use all of them."""
    num_tokens = 0
    while tokenizer.token_to_id(pattern(0, num_tokens, 0)) is not None:
        num_tokens += 1
    return (num_tokens // depth if num_tokens % depth == 0 else 0,) * depth


def _token(
    index: ItemIndex,
    item_id: str,
    name: str,
    tokenizer: Tokenizer,
    vocabulary: Mapping[str, int],
    added: Mapping[int, AddedToken],
) -> int:
    token = vocabulary.get(name)
    if token is None:
        stem = re.sub(r"\d+", "", name)
        similar = [other for other in vocabulary if re.sub(r"\d+", "", other) == stem]
        if not similar:
            pieces = len(tokenizer.encode(name, add_special_tokens=False).ids)
            fix = "add it with add_tokens and resize the embeddings before training"
            raise Refused(index.file, f"item {item_id}", f"{name} is {pieces} tokens", fix)
        nearest = (difflib.get_close_matches(name, similar, n=1, cutoff=0.0) or similar)[0]
        fix = f"the nearest is {nearest}: give the index of this checkpoint"
        raise Refused(index.file, f"item {item_id}", f"{name} is missing in tokenizer.json", fix)
    about: Any = added.get(token)
    if about is not None and (about.lstrip or about.rstrip or about.single_word):
        fix = "add it without lstrip, rstrip and single_word; prompts would differ from training"
        raise Refused("tokenizer.json", f"token {name}", "joins blanks or needs word boundaries", fix)
    return token


def _refuse_crowded(index: ItemIndex, codes: np.ndarray) -> None:
    distinct, counts = np.unique(codes, axis=0, return_counts=True)
    if counts.max(initial=0) > _MAX_SHARED:
        code = distinct[counts.argmax()].tolist()
        problem = f"code {code} belongs to {counts.max()} items, above {_MAX_SHARED}"
        raise Refused(index.file, "", problem, "resolve collisions by one more level")


def _warnings(tokens_ID: np.ndarray) -> list[str]:
    seen: dict[int, int] = {}
    for level, column in enumerate(tokens_ID.T):
        for token in np.unique(column).tolist():
            if token in seen:
                return [f"token {token} is used at levels {seen[token] + 1} and {level + 1}"]
            seen[token] = level
    return []


def describe_splitting(folder: Path) -> list[str]:
    """Return a warning if transformers splits text otherwise: its class for Qwen folders has a split of its own."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    about = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"] or {}
    parts = about.get("pretokenizers", [about])
    if kind not in _QWENS or any(part.get("pattern") == {"Regex": _QWEN_SPLIT} for part in parts):
        return []
    problem = f"tokenizer.json splits text otherwise than AutoTokenizer does for {kind}"
    return [f"{problem}; an evaluation by transformers then has other prompts"]


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json`. Raises Refused."""
    path = folder / "tokenizer.json"
    if not path.exists():
        slow = next(
            (name for name in ("tokenizer.model", "spiece.model", "vocab.json") if (folder / name).exists()), ""
        )
        problem = f"missing, {slow} found" if slow else "missing"
        fix = "save a fast tokenizer: AutoTokenizer.from_pretrained(FOLDER, use_fast=True).save_pretrained(FOLDER)"
        raise Refused(path.name, "", problem, fix)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any unreadable file
        raise Refused(path.name, "", f"not readable ({error})", "save the tokenizer again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
