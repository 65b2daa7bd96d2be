"""A loaded bundle: requests with item ids become engine rankings, and results become item ids."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.registry.bundle import Bundle
from services.contracts.engine_load import EngineLoad
from services.contracts.rank import RankRequest
from services.contracts.recommend import Filters
from services.errors import BundleCorrupt, CheckpointError
from services.llm.engine.config import EngineConfig
from services.llm.ranking.model import LoadedBundle, load_bundle
from services.llm.serving.streams import FinishedRequest
from tests.support.engine.checkpoints import overflowing
from tests.support.engine.dense import logits_of
from tests.support.training.bundles import MAX_ITEMS, STRIDE, build_decoder, live_store, publish_bundle

LOAD = EngineLoad(num_running=0, num_waiting=0, kv_cache_usage=0.0)


def load(bundle: Bundle, **limits: int) -> LoadedBundle:
    """Load for the CPU in fp32."""
    config = EngineConfig(num_blocks=64, cpu_kernels="torch", **limits)
    return load_bundle(bundle, config, torch.float32, "cpu")


def build_request(**changes) -> RankRequest:
    """Build a request of a user with four items of history."""
    fields = {"request_id": "r", "user_id": "u", "bundle_version": "v1", "k": 5, "budget_ms": 0.0}
    return RankRequest(**{**fields, "history_item_ids": ("i1", "i2", "gone", "i3"), **changes})


def rank(loaded: LoadedBundle, request: RankRequest):
    """Rank with the engine, without its thread."""
    loaded.engine_call(request, 10.0)(loaded.engine, "x", 1.0)
    outcomes = []
    while not outcomes:
        outcomes = loaded.engine.step(2.0)
    return loaded.result_of(FinishedRequest(outcomes[0], 2.5, LOAD))


def not_a_number(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with one number of the last norm replaced by NaN."""
    tensors["model.norm.weight"][3] = torch.nan
    return tensors


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return publish_bundle(tmp_path / "bundles", "v1")


def test_items_come_best_first_with_log_probabilities(bundle) -> None:
    """The k best items by dense scores are returned; items unknown to the bundle are skipped in the prompt."""
    loaded = load(bundle)

    result = rank(loaded, build_request())

    best = logits_of(build_decoder(31, seed=0), torch.tensor([0, 2, 3, 4]))[-1, 1:].log_softmax(-1).topk(5)
    assert result.item_ids == tuple(f"i{index}" for index in best.indices.tolist())
    np.testing.assert_allclose(result.scores, best.values, atol=1e-4)
    assert (result.bundle_version, result.num_prompt_tokens, result.load) == ("v1", 4, LOAD)
    assert (result.queue_ms, result.compute_ms) == (1_000.0, 500.0)


def test_filters_and_exclusions_restrict_the_result(bundle) -> None:
    """Only allowed, not excluded items are returned, fewer than k if necessary."""
    filters = Filters(categories=("even",), allowed_item_ids=("i2", "i3", "i4", "i6"))
    request = build_request(excluded_item_ids=("i4", "i1", "nothing"), filters=filters)

    assert set(rank(load(bundle), request).item_ids) == {"i2", "i6"}


@pytest.mark.parametrize("limits", [{}, {"max_waiting": 1, "max_running": 1}])
def test_the_warm_up_leaves_the_engine_empty(bundle, limits) -> None:
    """After loading, no request is in flight and no block is held, even if the queue is shorter than the warm-up."""
    loaded = load(bundle, **limits)

    assert not loaded.engine.has_work
    assert loaded.engine.load() == LOAD
    assert len(rank(loaded, build_request()).item_ids) == 5


def test_a_prompt_window_beyond_the_decoder_is_refused(bundle) -> None:
    """A bundle whose prompts could exceed the decoder's positions is corrupt."""
    too_long = dataclasses.replace(bundle, manifest={**bundle.manifest, "prompt": {"max_items": 64, "stride": 5}})

    with pytest.raises(BundleCorrupt, match="65 tokens, the decoder has 64 positions"):
        load(too_long)


@pytest.mark.parametrize(
    ("break_weights", "error", "reason"),
    [
        (overflowing, BundleCorrupt, "v2: the decoder computes scores that are not finite"),
        (not_a_number, CheckpointError, r"not finite: model\.norm\.weight"),
    ],
)
def test_a_decoder_whose_scores_are_not_finite_is_refused(
    bundle, tmp_path: Path, break_weights: Callable[..., Any], error: type[Exception], reason: str
) -> None:
    """Non-finite weights are reported by name, and an overflow by the warm-up's scores."""
    source = tmp_path / "source-v1"
    path = source / "decoder" / "model.safetensors"
    save_file(break_weights(load_file(path)), path)
    about = {"prompt": {"max_items": MAX_ITEMS, "stride": STRIDE}}
    broken = live_store(tmp_path / "bundles", source, "v2", about).live()

    with pytest.raises(error, match=reason):
        load(broken)
