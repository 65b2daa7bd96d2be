"""Variants of a trained bundle: built, measured in their engine, published as children."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from models.prompt import prompt_of
from models.registry.bundle import Bundle
from models.registry.bundle_diff import compare
from models.registry.store import BundleStore
from pipelines.data.examples import Split, read_cases
from pipelines.evaluation.held_out import LEDGER, read_ledger
from pipelines.optimize.choice import Worth
from pipelines.optimize.measure import gain
from pipelines.optimize.optimize import Optimised, OptimizeOptions, optimize
from pipelines.optimize.parent import open_parent
from pipelines.optimize.recipes import chosen
from pipelines.places import Places
from services.errors import BundleMoved, ConfigError
from tests.integration.pipelines.conftest import quiet

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Feast, ibis and pandas warn about each other
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ANY_LOSS = 0.99
ANY_GAIN = Worth(gain=0.05, loss=99.0, saved_bytes=0)
"""A decoder this small has no relevant gain."""


@pytest.fixture
def places(tmp_path: Path, copied_state: Callable[[Path], Places]) -> Places:
    """A folder after one pipeline run with a refit."""
    return copied_state(tmp_path / "state")


def optimised(places: Places, recipes: str, **options) -> tuple[Optimised, str]:
    """Optimise the live bundle with these recipes; return the result and the output."""
    shown, live = io.StringIO(), BundleStore(places.bundle_root).live_version()
    assert live is not None
    wanted = replace(OptimizeOptions(recipes=chosen(recipes), budget=ANY_LOSS, worth=ANY_GAIN), **options)
    return optimize(live, wanted, places, Console(file=shown, width=400)), shown.getvalue()


def test_winners_are_children_and_the_others_are_rows(places: Places) -> None:
    """Children have parent, recipe, report and picture; the table has reasons; no child is promoted unasked."""
    store = BundleStore(places.bundle_root)
    parent = store.live()

    optimised_parent, shown = optimised(places, "int4,int4-qat,pruned-ffn", epochs=1)

    assert store.live_version() == parent.version
    assert [row.name for row in optimised_parent.rows] == ["int4", "int4-qat", "pruned-ffn"]
    assert {
        name for name, verdict in optimised_parent.verdicts.items() if verdict.wins
    } == optimised_parent.children.keys()
    assert all(verdict.why in shown for verdict in optimised_parent.verdicts.values())
    assert optimised_parent.children
    for name, child in optimised_parent.children.items():
        assert store.open(child.version).manifest["lineage"]["optimised_from"] == parent.version
        assert child.manifest["optimisation"]["recipe"] == name
        assert child.weight_kind in {"int4", "int8_all"}
        assert {"pareto.png", "report.md"} <= child.manifest["files"].keys()
        assert f"| {name} |" in (child.path / "report.md").read_text()
        assert not child.is_whole_training
        rows, _ = compare(parent, child)
        assert ("files that serve", "", "", "different") in rows
    assert [line["purpose"] for line in read_ledger(places.stages_dir / LEDGER)][-1] == f"variants of {parent.version}"


def test_a_recipe_changes_the_judged_decoder_and_the_one_that_serves(places: Places) -> None:
    """With a refit both decoders are pruned; quantisation keeps both, and a second run reuses the work."""
    parent = BundleStore(places.bundle_root).live()
    pruned, _ = optimised(places, "pruned-heads", epochs=1, budget=0.9999)
    again, _ = optimised(places, "pruned-heads", epochs=1, budget=0.9999)
    stored, _ = optimised(places, "int4")

    def heads(bundle: Bundle, member: str) -> int:
        config = json.loads((bundle.path / member / "decoder" / "config.json").read_text())
        return int(config["num_attention_heads"])

    child = pruned.children["pruned-heads"]
    assert [heads(child, member) for member in ("", "judged")] == [1, 1]
    assert [heads(parent, member) for member in ("", "judged")] == [2, 2]
    assert (again.gains["pruned-heads"] == pruned.gains["pruned-heads"]).all()
    weights = "decoder/model.safetensors"
    assert stored.children["int4"].manifest["files"][weights] == parent.manifest["files"][weights]
    assert again.children["pruned-heads"].manifest["files"][weights] == child.manifest["files"][weights]


def test_what_is_measured_is_the_engine_s_list(places: Places) -> None:
    """NDCG@10 is that of the judged decoder's lists, computed here from the ranks of its dense fp32 scores."""
    from models.catalogue import load_catalogue
    from models.decoder.weights import load_decoder
    from pipelines.scoring.dense import DecoderScorer
    from pipelines.scoring.metrics import gains, rank_labels

    optimised_parent, _ = optimised(places, "int8")
    parent = open_parent(BundleStore(places.bundle_root).live(), places.stages_dir)
    decoder = load_decoder(parent.bundle.judged_dir / "decoder", torch.float32, "cpu")
    catalogue = load_catalogue(parent.tokenized / "catalogue.parquet")
    cases = read_cases(parent.tokenized, Split.TEST)

    ranks = rank_labels(DecoderScorer(decoder, catalogue, prompt_of(parent.bundle.manifest)), cases)

    np.testing.assert_allclose(optimised_parent.gains["parent"], gains(ranks.as_served(repeats=parent.repeats), 10))


def test_a_budget_that_nothing_meets_publishes_and_promotes_nothing(places: Places) -> None:
    """A heavily damaged decoder is a negative row, even if promotion was requested."""
    store = BundleStore(places.bundle_root)
    before = store.versions()

    optimised_parent, shown = optimised(places, "pruned-heads", epochs=1, budget=0.0, promotes=True)

    if optimised_parent.rows[0].low <= 0:
        assert (optimised_parent.live, optimised_parent.children, store.versions()) == (None, {}, before)
        assert "negative: may lose" in shown


def test_what_cannot_be_optimised_is_refused(places: Places) -> None:
    """Missing training data, and promotion of a child whose parent is no longer live, name the remedy."""
    store = BundleStore(places.bundle_root)
    live = store.live()

    child = optimised(places, "int4")[0].children["int4"]
    store.promote(child.version)
    wanted = OptimizeOptions(recipes=chosen("int4"), budget=ANY_LOSS, worth=ANY_GAIN, promotes=True)
    with pytest.raises(BundleMoved, match=child.version):
        optimize(live.version, wanted, places, quiet())

    (places.stages_dir / "tokenize" / live.manifest["lineage"]["stages"]["tokenize"]).rename(places.state_dir / "away")
    with pytest.raises(
        ConfigError, match=r"VERSION: the training data of .* are no longer in .*; run `tailrace pipeline`"
    ):
        optimize(live.version, OptimizeOptions(), places, quiet())


def test_lists_place_their_labels() -> None:
    """A label at position i adds 1 / log2(1 + i), a label outside the ten adds nothing."""
    listed = np.array([4, 2, 9])

    assert gain(listed, 4) == 1.0
    assert gain(listed, 9) == pytest.approx(0.5)
    assert gain(listed, 1) == 0.0
    assert gain(np.arange(20), 11) == 0.0
