"""Rules of reading words that name nothing in the catalogue, with a real graph and tokenizer of a few words."""

from pathlib import Path

import numpy as np
import pytest

from models.errors import BundleCorrupt
from models.wishes.meaning import Meaning, load_meaning, measure, text_of
from models.wishes.reader import Reader
from models.wishes.vocabulary import Vocabulary, WishItem
from services.wishes.encoder import GRAPH, load_encoder
from tests.support.tiny_encoder import write_tiny_encoder

TOPICS = (("comedy", "gags", "moons"), ("western", "gunslingers", "canyon"), ("horror", "screams", "ghosts"))
ITEMS = [
    WishItem("1", "Paper Moons", ("Comedy",)),
    WishItem("2", "Blue Canyon", ("Western",)),
    WishItem("3", "Ghosts", ("Horror",)),
    WishItem("4", "Ghosts of the Canyon", ("Horror", "Western")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder with an encoder of a few words."""
    folder = tmp_path_factory.mktemp("wishes")
    write_tiny_encoder(folder, TOPICS)
    encoder = load_encoder(folder)
    assert encoder is not None
    measure(encoder, Vocabulary(ITEMS), [text_of(item) for item in ITEMS]).save(folder)
    return folder


@pytest.fixture
def reader(folder: Path) -> Reader:
    """A reader with the encoder."""
    meaning = load_meaning(folder, len(ITEMS), load_encoder)
    assert meaning is not None
    return Reader(Vocabulary(ITEMS), meaning=meaning)


def best(reader: Reader, text: str) -> int:
    """Return the index of the item with the highest score."""
    scores = reader.read(text).scores
    assert scores is not None
    return int(scores.argmax())


def test_words_near_a_value_raise_its_items(reader: Reader) -> None:
    """A clause without the catalogue's own words is read by its meaning, and the reading says so."""
    assert best(reader, "gags for the evening") == 0
    assert best(reader, "gunslingers") == 1
    assert reader.read("gunslingers").understood.reader == "encoder"
    assert reader.read("a western").understood.reader == "keywords"


def test_words_near_a_refused_value_lower_its_items_and_exclude_nothing(reader: Reader) -> None:
    """The encoder's guesses are never masks."""
    reading = reader.read("no screams please")
    assert reading.excluded is None
    assert reading.scores is not None
    assert set(np.argsort(reading.scores)[:2].tolist()) == {2, 3}


def test_a_sentence_that_describes_no_item_scores_next_to_nothing(reader: Reader) -> None:
    """Requests such as "surprise me" are nearer to known fillers than to any value."""
    filler, gags = reader.read("recommend your favourite please").scores, reader.read("gags").scores
    assert gags is not None
    assert filler is None or np.abs(filler).max() < 0.1 * np.abs(gags).max()


def test_new_items_get_vectors_and_their_new_values_too(reader: Reader) -> None:
    """A live item is found by the meaning of its words, whether it is new or replaces an item."""
    grown = reader.with_items([WishItem("5", "Gags", ("Slapstick gags",)), WishItem("1", "Screams", ("Horror",))])
    assert grown.num_items == 5
    assert best(grown, "gags gags") == 4


def test_vectors_do_not_depend_on_the_number_of_threads(folder: Path) -> None:
    """Batches are encoded side by side, and each text keeps its place."""
    texts = [f"{'a ' * (number % 7)}{TOPICS[number % 3][number % 2]}" for number in range(300)]
    alone, together = load_encoder(folder), load_encoder(folder, num_threads=3)
    assert alone is not None
    assert together is not None
    np.testing.assert_array_equal(together.encode(texts), alone.encode(texts))


def test_vectors_of_another_catalogue_are_refused(folder: Path) -> None:
    """A reader's files must belong to the bundle's items."""
    with pytest.raises(BundleCorrupt):
        load_meaning(folder, len(ITEMS) + 1, load_encoder)


def test_a_broken_graph_is_refused(tmp_path: Path) -> None:
    """An unreadable encoder is a corrupt bundle."""
    (tmp_path / GRAPH).write_bytes(b"no graph")
    with pytest.raises(BundleCorrupt):
        load_encoder(tmp_path)


def test_vectors_are_saved_whole(folder: Path) -> None:
    """Loading returns what was measured."""
    meaning = load_meaning(folder, len(ITEMS), load_encoder)
    assert isinstance(meaning, Meaning)
    assert meaning.items_VD.dtype == np.int8
    assert np.linalg.norm(meaning.values_CD, axis=1) == pytest.approx(1, abs=1e-3)


def test_values_come_in_the_order_of_the_items() -> None:
    """An order by hash would give each training of the same data other files."""
    own = tuple(f"value {number}" for number in range(40))
    vocabulary = Vocabulary([WishItem("i0", "A lamp", own)])

    assert [term.value for term in vocabulary.items_of] == [*own]
