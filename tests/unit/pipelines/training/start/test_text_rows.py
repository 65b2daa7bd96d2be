"""Rows learned from text: saved as an ordinary decoder, resumed bitwise, and without effect if text is off."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch.nn.utils import parametrize

from models.catalogue import Catalogue, load_catalogue
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from models.registry.bundle import lists_version
from models.registry.store import BundleStore
from models.student import read_student
from pipelines.codes.embedding import fit_text, read_texts, save_texts, share_of_distinct_texts, texts_of
from pipelines.codes.options import CodesOptions
from pipelines.evaluation.pair import load_pair
from pipelines.publication.add_items import append_items
from pipelines.publication.new_items import add_new_items
from pipelines.runner.stage import silent
from pipelines.scoring.dense import DecoderScorer, hidden_states
from pipelines.tables.files import Frame
from pipelines.tables.reader import ItemTable
from pipelines.training.start.text_rows import ITEM_TEXT, TextRows, add_text, folded, learned_text, load_item_text
from pipelines.training.train_decoder import new_decoder, train
from services.contracts.items import ItemState
from services.errors import BundleCorrupt, ConfigError
from services.items.live_items import LiveItems
from services.student.ranker import StudentRanker
from tests.support.training.bundles import build_catalogue, live_store, with_judged_pair
from tests.support.training.synthetic import tokenized, write_ingested
from tests.unit.pipelines.conftest import CPU, MADE_AT, SMALL_DECODER, Built, checkpoints_in, learn_the_ring, ndcg_of

WITH_TEXT = replace(SMALL_DECODER, text_size=8, dropout=0.2)
Z_NEW = pl.DataFrame({"item_id": ["z-new"], "title": ["Item z"]})


def texts_for(catalogue: Catalogue) -> list[str]:
    """Return texts of two kinds of items with a unique word per item."""
    return [f"{['shampoo', 'lipstick'][index % 2]} number{index}" for index in range(len(catalogue.item_ids))]


def test_what_is_saved_computes_what_was_trained() -> None:
    """The folded decoder gives bitwise equal logits and has no text parameters."""
    catalogue = build_catalogue()
    decoder = new_decoder(catalogue, SMALL_DECODER)
    add_text(decoder, catalogue, texts_for(catalogue), 8)
    rows = text_rows(decoder)
    torch.nn.init.normal_(rows.map_TD)

    plain = folded(decoder)

    tokens = torch.tensor([[0, 3, 7, 1]])
    with torch.inference_mode():
        trained, served = (hidden_states(model, tokens) @ model.head_weight_VD.T for model in (decoder, plain))
    assert torch.equal(trained, served)
    assert plain.state_dict().keys() == new_decoder(catalogue, SMALL_DECODER).state_dict().keys()
    assert parametrize.is_parametrized(decoder.embedding)
    assert folded(plain) is plain


def test_rows_begin_as_they_were() -> None:
    """Adding text changes only the rows of items without training events, which get the predicted row."""
    catalogue = replace(build_catalogue(), popularity=np.arange(30, dtype=np.float64))  # item 0 has no events
    decoder = new_decoder(catalogue, SMALL_DECODER)
    before = decoder.embedding.weight.detach().clone()

    add_text(decoder, catalogue, texts_for(catalogue), 8)

    now, rows = decoder.embedding.weight.detach(), text_rows(decoder)
    of_unused = catalogue.tokens([0])[0]
    others = [token for token in range(catalogue.vocab_size) if token != of_unused]
    torch.testing.assert_close(now[others], before[others])
    torch.testing.assert_close(now[of_unused], rows.text_VT[of_unused] @ rows.map_TD)
    assert not torch.allclose(now[of_unused], before[of_unused])


TWO_ALIKE = [f"word{index} thing{index}" for index in range(30)]
TWO_ALIKE[4:6] = "red lipstick matte", "red lipstick glossy"


def test_items_of_like_text_learn_together() -> None:
    """A step on an item moves an item with similar text more than an item with other words."""
    catalogue = build_catalogue()
    decoder = new_decoder(catalogue, SMALL_DECODER)
    add_text(decoder, catalogue, TWO_ALIKE, 16)
    before = decoder.embedding.weight.detach().clone()
    first = catalogue.token_offsets[0]

    decoder.embedding.weight[first + 4].sum().backward()
    with torch.no_grad():
        rows = text_rows(decoder)
        rows.map_TD -= rows.map_TD.grad

    moved = (decoder.embedding.weight - before).norm(dim=1)
    assert moved[first + 5] > 3 * moved[first + 6]


def test_a_new_item_borrows_from_items_of_like_text(tmp_path: Path) -> None:
    """A known text gives its item's row, a similar text a row in between, and unknown words a zero row."""
    catalogue = build_catalogue()
    decoder = new_decoder(catalogue, SMALL_DECODER)
    encoder = add_text(decoder, catalogue, TWO_ALIKE, 30)
    learned_text(decoder, encoder).save(tmp_path)
    learned = load_item_text(tmp_path)
    assert learned is not None

    same, between, empty = learned.rows([TWO_ALIKE[7], "red lipstick", ""])

    trained = decoder.head_weight_VD.detach()[catalogue.token_offsets[0] :]
    torch.testing.assert_close(same, trained[7], atol=1e-3, rtol=1e-2)
    near = torch.nn.functional.cosine_similarity(between, trained)
    assert set(near.topk(2).indices.tolist()) == {4, 5}
    assert not empty.any()


@pytest.mark.parametrize("depth", [1, 2])
def test_codes_of_any_depth_learn_from_text(depth: int, tmp_path: Path) -> None:
    """The saved decoder predicts the next item of the ring."""
    tokens = tokenized(write_ingested(tmp_path / "ingest"), tmp_path / "tokens", CodesOptions(depth=depth))
    options = replace(WITH_TEXT, dropout=0.0, fit=replace(WITH_TEXT.fit, epochs=8 * depth))

    train(tokens, options, tmp_path, checkpoints_in(tmp_path / "saved"), CPU, silent)

    assert ndcg_of(tmp_path / "decoder", tokens) > 0.7


@pytest.fixture
def bare(built: Built, tmp_path: Path) -> Path:
    """The ring's tokens without its texts."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    for name in ("catalogue.parquet", "examples.parquet"):
        (folder / name).write_bytes((built.trained.tokenized / name).read_bytes())
    return folder


def test_without_text_size_texts_change_nothing(built: Built, bare: Path, tmp_path: Path) -> None:
    """Weights are equal with and without texts in the folder."""
    train(bare, SMALL_DECODER, tmp_path, checkpoints_in(tmp_path / "saved"), CPU, silent)

    assert (len(read_texts(bare)), len(read_texts(built.trained.tokenized))) == (0, 30)
    folders = (tmp_path / "decoder", built.trained.decoder_dir)
    first, other = (load_decoder(folder, torch.float32, CPU) for folder in folders)
    assert torch.equal(first.head_weight_VD, other.head_weight_VD)


def test_a_text_size_without_texts_is_refused_by_its_field(bare: Path, tmp_path: Path) -> None:
    """The error is raised before training and names the fix."""
    with pytest.raises(ConfigError, match=r"decoder\.text_size: .* 0 texts of 30 items; run the stage tokenize again"):
        train(bare, WITH_TEXT, tmp_path, checkpoints_in(tmp_path / "saved"), CPU, silent)


@pytest.mark.parametrize("text", ["", "a", "untitled", "日本語", "\0"])
def test_texts_that_tell_nothing_have_finite_vectors(text: str, tmp_path: Path) -> None:
    """Vectors are finite with norm at most 1, and texts are read back unchanged."""
    texts = [text] * 5
    save_texts(texts, tmp_path)

    vectors = fit_text(texts, 64, 0).encode([*texts, "never seen"])

    assert np.isfinite(vectors).all()
    assert (np.linalg.norm(vectors, axis=1) <= 1 + 1e-5).all()
    assert vectors.dtype == np.float32
    assert read_texts(tmp_path) == texts
    assert share_of_distinct_texts(texts) == 0.0


def test_texts_are_in_the_catalogues_order(tmp_path: Path) -> None:
    """Texts follow the catalogue's order, not the item table's."""
    ingested = write_ingested(tmp_path / "ingest")
    items = pl.read_parquet(ingested / "items.parquet")
    items.reverse().write_parquet(ingested / "items.parquet")

    tokens = tokenized(ingested, tmp_path / "tokens")

    titles = load_catalogue(tokens / "catalogue.parquet").titles
    assert all(text.startswith(title) for text, title in zip(read_texts(tokens), titles, strict=True))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return learn_the_ring(tmp_path_factory.mktemp("learned"), replace(WITH_TEXT, dropout=0.0))


def store_of(root: Path, bundle: Path) -> BundleStore:
    return live_store(root, bundle, "first", {"num_items": 30})


def test_a_new_item_is_ranked_by_its_text_without_training(learned: Built, tmp_path: Path) -> None:
    """An item appended at depth 1 gets the row of its text, and the scores of old items do not change."""
    bundle = learned.assembled / "bundle"
    store = store_of(tmp_path, bundle)
    raw = pl.DataFrame({"item_id": ["z-new", "a-new", "i03"], "title": ["Item z", "Item i03", "Another title"]})

    live, num_new = append_items(store, ItemTable(Frame(raw, "items")), MADE_AT)

    before, now = load_catalogue(bundle / "catalogue.parquet"), live.catalogue()
    rows, names = now.indices(before.item_ids), ["i03", "i04", "i05"]
    history, new_history = np.array(before.indices(names)), np.array(now.indices(names))
    old_decoder, decoder = (
        load_decoder(folder, torch.float32, CPU) for folder in (bundle / "decoder", live.decoder_dir)
    )
    text = load_item_text(live.path)
    assert text is not None
    assert (num_new, live.manifest["num_items"], now.item_ids[0], now.item_ids[-1]) == (2, 32, "a-new", "z-new")
    np.testing.assert_allclose(
        DecoderScorer(decoder, now, Prompt(10, 5))([new_history])[0][rows],
        DecoderScorer(old_decoder, before, Prompt(10, 5))([history])[0],
        atol=1e-4,
    )
    np.testing.assert_allclose(
        StudentRanker(live.student_path).score(new_history.tolist())[rows],
        StudentRanker(bundle / "student.onnx").score(history.tolist()),
        atol=1e-4,
    )
    tokens = now.tokens(now.indices(["a-new", "z-new"]))
    torch.testing.assert_close(decoder.head_weight_VD[tokens].detach(), text.rows(["Item i03", "Item z"]))
    assert append_items(store, ItemTable(Frame(raw, "items")), MADE_AT) == (live, 0)


def test_new_items_of_the_live_catalogue_join_the_live_bundle(learned: Built, tmp_path: Path) -> None:
    """Items with titles that may be shown are added once; stored lists stay valid, cached prefixes do not.

    Their texts stay as they are, also where a table of the shop would have a list or a missing value.
    """
    store, items = store_of(tmp_path, learned.assembled / "bundle"), LiveItems()
    categories = ("Home | Garden", "Tops; tees", "[b]", "Q&amp;A")
    states = [
        ItemState(item_id="z-new", title="Null", categories=categories),
        ItemState(item_id="hidden", title="Item h", available=False),
        ItemState(item_id="expired", title="Item e", expires_ms=10**12),
        ItemState(item_id="announced", title="Item p", published_ms=10**14),
        ItemState(item_id="untitled"),
        ItemState(item_id="i03", title="Renamed"),
    ]
    items.apply([*((state.item_id, state) for state in states), ("gone", None)])
    first = store.live()

    assert add_new_items(store, items, lambda _sentence: None, keep_bundles=5) == 1
    child = store.live()
    assert set(child.item_ids()) - set(first.item_ids()) == {"z-new"}
    index = child.item_ids().index("z-new")
    assert (child.catalogue().titles[index], child.catalogue().categories[index]) == ("Null", categories)
    assert lists_version(child.manifest, child.version) == "first"
    assert lists_version(child.manifest, "another") == "another"
    assert child.prefix_version != first.prefix_version
    assert add_new_items(store, items, lambda _sentence: None, keep_bundles=5) == 0
    assert store.live_version() == child.version


def test_rows_that_add_items_leaves_out_or_changes_are_reported(learned: Built, tmp_path: Path) -> None:
    """Skipped and changed rows are reported by reason with a count and sample ids."""
    store = store_of(tmp_path, learned.assembled / "bundle")
    known = [f"i{number:02d}" for number in range(6)]
    rows = [*((name, "Again") for name in known), ("7.0", ""), ("", "No id"), ("z", "Z"), ("z", "Other"), ("z", "Z")]
    reported: list[str] = []

    table = pl.DataFrame(rows, ["item_id", "title"], orient="row")
    live, num_new = append_items(store, ItemTable(Frame(table, "new.csv")), MADE_AT, report=reported.append)

    titles = dict(zip(live.catalogue().item_ids, live.catalogue().titles, strict=True))
    assert (num_new, titles["7"], titles["z"]) == (2, "7", "Z")
    assert reported == [
        (
            "items: 1 values of column item_id are written as floating-point numbers and read as integers, "
            "such as 7.0 as 7"
        ),
        "items: 1 exact duplicates are dropped, such as item_id=z",
        "items: 1 rows are merged into the first row of their item, whose values stay, such as row 10, item_id=z",
        "items: 1 values of merged rows differ from those that stay, such as title 1",
        "items: 1 without a title are kept under their id, such as item_id=7",
        "items: 1 set aside (item_id), such as item_id=, title=No id; row 8",
        "items: 6 are already in the bundle and stay unchanged, such as item_id=i00, i01, i02, i03, i04",
    ]


def test_a_title_that_is_the_id_is_no_text() -> None:
    """A title equal to the id is not used as text, so rows are not learned from ids."""
    items = {"item_id": ["a", "b"], "title": ["a", "Rake"], "categories": [["x"], []], "text": ["a", "b"]}

    assert [text.split() for text in texts_of(pl.DataFrame(items))] == [["x"], ["Rake", "b"]]


def test_new_items_join_the_judged_pair_too(learned: Built, tmp_path: Path) -> None:
    """New items are also added to the judged pair, which ranks them like the served pair if both were equal."""
    store = store_of(tmp_path / "bundles", with_judged_pair(learned.assembled / "bundle", tmp_path / "bundle"))

    live, _ = append_items(store, ItemTable(Frame(Z_NEW, "items")), MADE_AT)

    history = [np.array(live.catalogue().indices(["i03", "i04"]))]
    served, judged = (
        load_pair(folder, CPU).scorers(load_catalogue(folder / "catalogue.parquet"), Prompt(10, 5))
        for folder in (live.path, live.judged_dir)
    )
    assert live.judged_dir != live.path
    for name, scorer in served.items():
        assert np.array_equal(judged[name](history), scorer(history))
        assert scorer(history).shape == (1, 31)


def test_a_lift_multiplies_new_rows_alone(learned: Built, tmp_path: Path) -> None:
    """The lift scales new rows in decoder and student, and invalid factors are rejected by option."""
    store, rows = store_of(tmp_path, learned.assembled / "bundle"), []
    for lift in (1.0, 1.5):
        store.promote("first")
        live, _ = append_items(store, ItemTable(Frame(Z_NEW, "items")), MADE_AT, lift)
        decoder = load_decoder(live.decoder_dir, torch.float32, CPU)
        student = read_student(live.path / "student.safetensors")
        rows.append((decoder.head_weight_VD.detach(), student.embedding.weight.detach()))

    for plain, lifted in zip(*rows, strict=True):
        torch.testing.assert_close(lifted[-1], 1.5 * plain[-1])
        assert torch.equal(lifted[:-1], plain[:-1])
    for lift in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"--lift: .* is not a factor; give a number above 0"):
            append_items(store, ItemTable(Frame(Z_NEW, "items")), MADE_AT, lift)


def test_new_items_of_a_bundle_without_text_are_refused(built: Built, tmp_path: Path) -> None:
    """Depth 1 without text cannot add items without training, and the error names both alternatives."""
    store = store_of(tmp_path, built.assembled / "bundle")

    with pytest.raises(ConfigError, match=r"first: its codes have depth 1.* text_size, or with .*--code-depth 3"):
        append_items(store, ItemTable(Frame(Z_NEW, "items")), MADE_AT)


def test_a_damaged_map_is_named(learned: Built, tmp_path: Path) -> None:
    """A corrupt map raises BundleCorrupt with its path; a missing file means that no map exists."""
    assert load_item_text(tmp_path) is None
    (tmp_path / ITEM_TEXT).write_bytes((learned.assembled / "bundle" / ITEM_TEXT).read_bytes()[:100])

    with pytest.raises(BundleCorrupt, match=ITEM_TEXT):
        load_item_text(tmp_path)


def text_rows(decoder: torch.nn.Module) -> TextRows:
    """Return the module that computes the decoder's rows."""
    (rows,) = (module for module in decoder.modules() if isinstance(module, TextRows))
    return rows
