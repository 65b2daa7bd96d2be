"""Rules of reading words that name nothing in the catalogue, with a real graph and tokenizer of a few words."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from models.errors import BundleCorrupt
from models.wishes.meaning import Meaning, load_meaning, measure, text_of
from models.wishes.reader import Reader
from models.wishes.vocabulary import Vocabulary, WishItem
from services.wishes.encoder import GRAPH, TOKENIZER, load_encoder

TOPICS = (("comedy", "gags", "moons"), ("western", "gunslingers", "canyon"), ("horror", "screams", "ghosts"))
FILLER = ("recommend", "best", "please", "for", "the")
ITEMS = [
    WishItem("1", "Paper Moons", ("Comedy",)),
    WishItem("2", "Blue Canyon", ("Western",)),
    WishItem("3", "Ghosts", ("Horror",)),
    WishItem("4", "Ghosts of the Canyon", ("Horror", "Western")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder that maps each word of a topic to the topic's direction, other words to one more."""
    folder = tmp_path_factory.mktemp("wishes")
    words = ["[UNK]", *(word for topic in TOPICS for word in topic)]
    table = np.full((len(words), 4), 0.01, dtype=np.float32)
    table[0, 3] = 1
    for topic in range(3):
        table[1 + 3 * topic : 4 + 3 * topic, topic] = 1
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["mask"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["float", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "middle"], ["sums"], keepdims=0),
        helper.make_node("LpNormalization", ["sums"], ["vectors"], axis=-1, p=2),
    ]
    constants = {"table": table, "last": np.array([2]), "middle": np.array([1])}
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["B", "L"]) for name in ("ids", "mask")],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["B", 4])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / GRAPH)
    tokenizer = Tokenizer(models.WordLevel({word: row for row, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / TOKENIZER))
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
