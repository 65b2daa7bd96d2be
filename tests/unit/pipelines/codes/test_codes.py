"""Codes of depth above 1: assignment against brute force, the code book, and all stages with such codes."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.catalogue import load_catalogue
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from models.registry.bundle import Bundle, lists_version
from models.registry.store import BundleStore
from pipelines.codes import quantizer
from pipelines.codes.code_book import CODE_BOOK, describe, load_code_book, make_codes
from pipelines.codes.options import CodesOptions
from pipelines.codes.paths import place
from pipelines.codes.quantizer import CodeLevel
from pipelines.codes.reuse import extended_codes, kept_codes
from pipelines.codes.tokenize import describe_codes
from pipelines.evaluation.evaluate import read_report
from pipelines.publication.add_items import append_items
from pipelines.publication.model_card import CARD
from pipelines.scoring.beams import BeamScorer
from pipelines.tables.files import Frame
from pipelines.tables.reader import ItemTable
from services.errors import BundleMoved, BundleWithdrawn, ConfigError, StageFailed
from services.student.ranker import StudentRanker
from tests.support.training.bundles import live_store
from tests.unit.pipelines.conftest import CPU, MADE_AT, SMALL_DECODER, Built, learn_the_ring

NEW = pl.DataFrame({"item_id": ["a-new", "i03"], "title": ["Item a-new", "Another title"]})


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The ring, trained with codes of depth 3 (three tokens per item)."""
    return learn_the_ring(tmp_path_factory.mktemp("deep"), SMALL_DECODER, CodesOptions(depth=3))


@pytest.fixture
def store(deep: Built, tmp_path: Path) -> BundleStore:
    """A store with the ring's bundle live as `first`."""
    about, card = {"num_items": 30, "lineage": {"seed": 0}}, {CARD: "# Bundle first\n"}
    return live_store(tmp_path, deep.assembled / "bundle", "first", about, card)


def test_every_stage_works_with_deep_codes(deep: Built) -> None:
    """Decoder and student learn the ring with codes of depth 3, and the bundle contains the code book."""
    ndcg = {name: metrics["ndcg@10"] for name, metrics in read_report(deep.evaluated)["metrics"].items()}

    assert min(ndcg["decoder"], ndcg["student"]) > 0.7
    assert load_catalogue(deep.assembled / "bundle" / "catalogue.parquet").depth == 3
    assert len(load_code_book(deep.assembled / "bundle" / CODE_BOOK).levels) == 3
    assert "codes have depth 3 (as given)" in describe_codes(deep.trained.tokenized)


@pytest.mark.parametrize(
    ("depth", "num_items", "free_gib", "expected"),
    [
        (None, 99_999, 64, (1,)),
        (None, 100_000, 64, (1, 3)),
        (None, 100_000, 0.1, (3,)),
        (None, 10_000_000, 16, (3,)),
        (2, 100_000, 64, (2,)),
        (1, 10_000_000, 16, (1,)),
    ],
)
def test_two_depths_are_compared_where_a_token_an_item_fits_in_memory(depth, num_items, free_gib, expected) -> None:
    """Only a single depth is tried for a small catalogue, with too little memory, or if the depth is given."""
    depths = CodesOptions(depth=depth).depths_to_compare(num_items, hidden_size=64, free_bytes=int(free_gib * 2**30))

    assert depths == expected


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), num_items=st.integers(8, 60), depth=st.integers(1, 4))
def test_each_item_has_its_own_path_of_the_nearest_codes(seed: int, num_items: int, depth: int) -> None:
    """Paths are unique, and an item without conflicts has the codes found by brute force, level by level."""
    embeddings = np.random.default_rng(seed).normal(size=(num_items, 4)).astype(np.float32)
    embeddings[1] = embeddings[0]  # two items with the same text

    levels, codes = make_codes(embeddings, CodesOptions().level_size(num_items, depth), depth, seed)

    assert describe(codes, [len(level.prices_S) for level in levels])["collisions"] == 0
    alone = place(levels, embeddings[5:6], np.zeros((0, depth), dtype=np.int32))[0]
    residual = embeddings[5].astype(np.float64)
    for level, code in zip(levels, alone, strict=True):
        costs = [
            ((residual - centroid) ** 2).sum() + price
            for centroid, price in zip(level.centroids_SD, level.prices_S, strict=True)
        ]
        assert costs[code] == pytest.approx(min(costs), abs=1e-4)
        residual = residual - level.centroids_SD[code]


def test_items_of_one_text_take_every_path_before_one_is_refused() -> None:
    """27 items with equal embeddings use all paths of three levels of three codes; a further item fails."""
    rng = np.random.default_rng(0)
    levels = [CodeLevel(rng.normal(size=(3, 4)).astype(np.float32), np.zeros(3, dtype=np.float32)) for _ in range(3)]
    items = np.ones((27, 4), dtype=np.float32)

    first = place(levels, items[:20], np.zeros((0, 3), dtype=np.int32))
    second = place(levels, items[20:], first)

    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 27
    with pytest.raises(StageFailed, match="all code paths of an item are taken"):
        place(levels, items[:1], np.concatenate([first, second]))


@pytest.mark.parametrize("seed", range(4))
def test_groups_far_apart_have_a_code_each(seed: int) -> None:
    """The codes of 48 groups are as close to their items as the true centres, unlike with a single random start."""
    rng = np.random.default_rng(seed)
    middles = 10 * rng.normal(size=(48, 8))
    items = (middles.repeat(20, axis=0) + 0.1 * rng.normal(size=(960, 8))).astype(np.float32)

    level = quantizer.fit_level(items, 48, seed)

    codes = level.assign(items)
    error = (level.leave(items, codes) ** 2).sum()
    assert error <= 1.01 * ((items - middles.repeat(20, axis=0)) ** 2).sum()
    assert np.bincount(codes, minlength=48).tolist() == [20] * 48


def test_crowded_codes_give_items_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """For skewed data, the prices reduce the size of the fullest code."""
    embeddings = (np.random.default_rng(0).exponential(size=(3000, 6)) ** 2).astype(np.float32)

    fullest = []
    for rounds in (0, 30):
        monkeypatch.setattr(quantizer, "_ROUNDS", rounds)
        codes = quantizer.fit_level(embeddings, 32, seed=0).assign(embeddings)
        fullest.append(np.bincount(codes, minlength=32).max())

    assert fullest[1] < 0.9 * fullest[0]


def test_new_items_get_codes_and_old_codes_stay(deep: Built) -> None:
    """A code book assigns codes to new items, and existing items keep their codes, also after removals."""
    kept = kept_codes(deep.assembled / "bundle")
    assert kept is not None
    for num_gone, new in ((0, ["new1", "new2"]), (0, []), (3, [])):
        ids = [*kept.catalogue.item_ids[num_gone:], *new]

        codes = extended_codes(ids, [f"Item {name}" for name in ids], kept)

        assert np.array_equal(codes[: 30 - num_gone], kept.catalogue.codes[num_gone:])
        assert len(np.unique(codes, axis=0)) == len(ids)
        assert (codes < np.array(kept.catalogue.level_sizes)).all()


def test_a_new_item_is_ranked_by_both_models_without_training(deep: Built, store: BundleStore) -> None:
    """Appended items can be returned by decoder and student; old codes and scores do not change; a lift is rejected."""
    bundle, prefixes = deep.assembled / "bundle", store.live().prefix_version

    live, num_new = append_items(store, ItemTable(Frame(NEW, "items")), MADE_AT)

    before, now = load_catalogue(bundle / "catalogue.parquet"), live.catalogue()
    rows = now.indices(before.item_ids)
    history = [before.index_of[name] for name in ("i03", "i04", "i05")]
    decoder = load_decoder(live.decoder_dir, torch.float32, CPU)
    widened = StudentRanker(live.student_path).score(now.indices(["i03", "i04", "i05"]))
    beams = BeamScorer(decoder, now, Prompt(10, 5))([np.array(now.indices(["i03", "i04", "i05"]))])[0]
    assert (num_new, store.live_version(), live.manifest["num_items"]) == (1, live.version, 31)
    names = dict.fromkeys(("items_added_to", "weights_of", "training"), "first")
    assert live.manifest["lineage"] == {"seed": 0, **names}
    assert (live.path / CARD).read_text().startswith("This bundle adds 1 items to first without training.")
    assert np.array_equal(now.codes[rows], before.codes)
    assert live.prefix_version == prefixes  # the decoder's cached prefixes remain valid
    assert lists_version(live.manifest, live.version) == "first"
    assert now.titles[now.index_of["i03"]] == "Item i03"
    np.testing.assert_allclose(widened[rows], StudentRanker(bundle / "student.onnx").score(history), atol=1e-4)
    assert np.isfinite(beams[now.index_of["a-new"]])
    assert widened[now.index_of["a-new"]] > widened[rows].min()
    assert append_items(store, ItemTable(Frame(NEW, "items")), MADE_AT) == (live, 0)
    with pytest.raises(ConfigError, match=r"--lift: 1\.5 has no effect where codes are deeper than 1.*; remove it"):
        append_items(store, ItemTable(Frame(NEW, "items")), MADE_AT, lift=1.5)


def test_a_withdrawn_bundle_does_not_come_back_by_adding_its_items_again(store: BundleStore) -> None:
    """Identical files under another name are rejected before they are copied, unless forced."""
    larger, _ = append_items(store, ItemTable(Frame(NEW, "items")), MADE_AT)
    store.rollback(by="ann")
    later = MADE_AT + timedelta(hours=1)

    with pytest.raises(BundleWithdrawn, match=f"is identical to {larger.version}: .* withdrawn by ann"):
        append_items(store, ItemTable(Frame(NEW, "items")), later)

    assert store.versions() == ["first", larger.version]
    assert (
        append_items(store, ItemTable(Frame(NEW, "items")), later, force=True)[0].version
        == store.live_version()
        != larger.version
    )


def test_items_are_not_added_over_a_bundle_that_went_live_meanwhile(
    deep: Built, store: BundleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training published while items are added stays live."""
    store.publish(deep.assembled / "bundle", "trained", {"num_items": 30})
    publish = BundleStore.publish

    def overtaken(*given: Any) -> Bundle:
        BundleStore(tmp_path).promote("trained")
        return publish(*given)

    monkeypatch.setattr(BundleStore, "publish", overtaken)

    with pytest.raises(BundleMoved, match="the live version is trained and no longer first"):
        append_items(store, ItemTable(Frame(NEW, "items")), MADE_AT)
    assert store.live_version() == "trained"
