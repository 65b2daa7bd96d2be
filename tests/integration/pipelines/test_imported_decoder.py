"""An imported decoder takes the place of training: its student, bundle, lists, and new items with known codes."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from models.catalogue import load_catalogue
from models.prompt import prompt_of
from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from pipelines.evaluation.gate import GateOptions
from pipelines.foreign.model import import_model
from pipelines.foreign.options import ForeignOptions, ImportOptions
from pipelines.foreign.refused import Refused
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.publication.add_items import append_items
from pipelines.tables.files import Frame
from pipelines.tables.reader import ItemTable
from services.errors import ConfigError, StageFailed
from services.llm.engine.config import EngineConfig
from services.llm.ranking.model import load_bundle
from tests.integration.pipelines.conftest import places_in, run
from tests.support.foreign.recommenders import (
    Recommender,
    random_sids,
    sid_names,
    write_csv_rows,
    write_model,
    write_tokenizer,
)
from tests.support.servers import Server
from tests.support.training.synthetic import raw_items


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Recommender:
    """A recommender over the ring's items, with a code that no item of the tables has."""
    root = tmp_path_factory.mktemp("recommender")
    sids = {f"i{row:02d}": sid for row, sid in enumerate(random_sids(30).values())} | {
        "gone": ["<a_0>", "<b_0>", "<c_0>"]
    }
    tokenizer = write_tokenizer(root / "model", sid_names())
    write_model(root / "model", "qwen2", tokenizer.get_vocab_size())
    (root / "Ring.index.json").write_text(json.dumps(sids))
    return Recommender(root / "model", root / "Ring.index.json", sids)


@pytest.fixture(scope="module")
def imported(
    tmp_path_factory: pytest.TempPathFactory, made: Recommender, store: Server, options: PipelineOptions
) -> tuple[Places, PipelineOptions, str]:
    """A state folder after the import and a pipeline run with it, the run's options, and its output."""
    places = places_in(tmp_path_factory.mktemp("imported") / "state", store)
    write_csv_rows(made, made.folder.parent / "test.csv", 12)
    rows = ImportOptions(
        checkpoint=made.folder,
        index=made.index,
        examples=made.folder.parent / "test.csv",
        name="ring",
        beam_width=8,
        max_measured=4,
    )
    import_model(rows, places.state_dir, lambda _: None)
    gate = GateOptions(baseline="popularity", student_floor=0.1)
    foreign = ForeignOptions(decoder="ring", distil_positions=60)
    options = replace(options, foreign=foreign, gate=gate)
    return places, options, run(options, places)[1]


def live(places: Places) -> Bundle:
    return BundleStore(places.bundle_root).live()


def test_the_bundle_has_the_import_and_its_marks(
    imported: tuple[Places, PipelineOptions, str], made: Recommender
) -> None:
    """Manifest, catalogue and card name the import; labels that it may have seen earn no routing."""
    places, _, shown = imported
    bundle, catalogue = live(places), live(places).catalogue()

    assert bundle.manifest["imported"]["framework"] == "minionerec"
    assert bundle.manifest["search"]["beam_width"] == 8
    assert (bundle.manifest["llm_pays"], bundle.manifest["may_have_seen_labels"]) == ([], True)
    assert bundle.manifest["mixer"]["blends"]["decoder"] == []
    assert not bundle.is_whole_training
    assert catalogue.first_tokens is not None
    assert len(catalogue.item_ids) == 30
    assert "1 codes without an item" in " ".join(shown.split())
    assert "may have seen its labels" in (bundle.path / "report.md").read_text()
    assert load_catalogue(bundle.judged_dir / "catalogue.parquet").codes.tolist() == catalogue.codes.tolist()


def test_a_replica_ranks_with_the_prompt_of_the_import(imported: tuple[Places, PipelineOptions, str]) -> None:
    """The loaded bundle has the import's prompt and width, and answers with distinct items of the catalogue."""
    bundle = live(imported[0])
    loaded = load_bundle(bundle, EngineConfig(num_blocks=512), torch.float32, "cpu")
    tokens = loaded.prompt.tokens(loaded.catalogue, [1, 2, 3])
    loaded.engine.add_rank("one", tokens, k=10)
    items = np.concatenate([outcome.item_indices for outcome in loaded.engine.step(0.0)] or [np.zeros(0, int)])
    while loaded.engine.has_work:
        items = np.concatenate([items, *(outcome.item_indices for outcome in loaded.engine.step(0.0))])

    assert loaded.prompt == prompt_of(bundle.manifest)
    assert len(set(items.tolist())) == len(items) == 10


def test_a_new_item_with_a_known_code_joins_without_training(
    imported: tuple[Places, PipelineOptions, str], made: Recommender, tmp_path: Path
) -> None:
    """The decoder's prefixes stay cached; an unknown code and a missing index are refused."""
    places, _, _ = imported
    store, before = BundleStore(places.bundle_root), live(places)
    rows = pl.DataFrame({"item_id": ["new"], "title": ["A new item"], "categories": ["even"]})
    index = tmp_path / "new.json"

    def add(path: Path | None) -> Bundle:
        table = ItemTable(Frame(pl.concat([raw_items(30), rows]), "items"))
        return append_items(store, table, datetime.now(UTC), index=path)[0]

    with pytest.raises(ConfigError):
        add(None)
    index.write_text(json.dumps({"new": ["<a_1>", "<b_2>", "<c_99>"]}))
    with pytest.raises(Refused) as caught:
        add(index)
    index.write_text(json.dumps(made.sids | {"new": made.sids["i03"]}))
    added = add(index)

    assert caught.value.row == "item new"
    assert added.prefix_version == before.prefix_version
    now = added.catalogue()
    assert (now.codes[now.index_of["new"]] == now.codes[now.index_of["i03"]]).all()


def test_items_without_a_code_above_five_percent_of_events_are_refused(
    imported: tuple[Places, PipelineOptions, str], made: Recommender, tmp_path: Path
) -> None:
    """An index of other item ids would leave most of the catalogue out."""
    places, options, _ = imported
    index = tmp_path / "half.index.json"
    index.write_text(json.dumps({item_id: made.sids[item_id] for item_id in made.item_ids[:15]}))

    with pytest.raises(StageFailed, match="have no code in the index"):
        run(replace(options, foreign=ForeignOptions(index=index), until="tokenize"), places)


def test_our_decoder_learns_on_codes_from_elsewhere(
    imported: tuple[Places, PipelineOptions, str], made: Recommender
) -> None:
    """An index without a model gives the codes; shared codes stay shared, and the decoder is our own."""
    places, options, _ = imported
    foreign = ForeignOptions(index=made.index)
    report, _ = run(replace(options, foreign=foreign, until="evaluate"), places)
    folders = {output.stage: output.path for output in report.stages}
    catalogue = load_catalogue(folders["tokenize"] / "catalogue.parquet")

    assert (catalogue.depth, catalogue.first_tokens) == (3, None)
    assert (catalogue.codes[catalogue.index_of["i00"]] == catalogue.codes[catalogue.index_of["i24"]]).all()
    assert report.evaluation is not None
