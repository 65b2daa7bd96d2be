"""A loaded bundle: requests in item ids become what the engine ranks, and its answer comes back in item ids."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from models.registry import Bundle
from services.contracts.rank import EngineLoad, RankRequest
from services.contracts.recommend import Filters
from services.errors import BundleCorrupt
from services.llm.engine.config import EngineConfig
from services.llm.ranking.model import LoadedBundle, load_bundle
from services.llm.serving.streams import Ended
from tests.support.bundles import build_decoder, publish_bundle

LOAD = EngineLoad(num_running=0, num_waiting=0, kv_cache_usage=0.0)


def load(bundle: Bundle) -> LoadedBundle:
    """Load for the CPU in fp32."""
    return load_bundle(bundle, EngineConfig(num_blocks=64), torch.float32, "cpu")


def build_request(**fields) -> RankRequest:
    """Build a request of a user with four items of history."""
    known = {
        "request_id": "r",
        "user_id": "u",
        "bundle_version": "v1",
        "history_item_ids": ("i1", "i2", "gone", "i3"),
        "k": 5,
        "deadline_unix_s": 0.0,
    }
    return RankRequest(**{**known, **fields})


def rank(loaded: LoadedBundle, request: RankRequest):
    """Rank with the engine alone."""
    loaded.engine_call(request, 10.0)(loaded.engine, "x", 1.0)
    outcomes = []
    while not outcomes:
        outcomes = loaded.engine.step(2.0)
    return loaded.result_of(Ended(outcomes[0], 2.5, LOAD))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A tiny bundle, live."""
    return publish_bundle(tmp_path / "bundles", "v1")


def test_items_come_best_first_with_log_probabilities(bundle) -> None:
    """The k best by the decoder's own scores come back as item ids; items unknown to the bundle are left out of the prompt."""
    loaded = load(bundle)

    result = rank(loaded, build_request())

    tokens = torch.tensor([0, 2, 3, 4])
    decoder = build_decoder(31, seed=0)

    def attend(_layer, q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    with torch.inference_mode():
        logp = (decoder(tokens, torch.arange(4), attend)[-1] @ decoder.head_weight_VD[1:].T).log_softmax(-1)
    best = logp.topk(5)
    assert result.item_ids == tuple(f"i{index}" for index in best.indices.tolist())
    np.testing.assert_allclose(result.scores, best.values, atol=1e-4)
    assert (result.bundle_version, result.num_prompt_tokens, result.load) == ("v1", 4, LOAD)
    assert (result.queue_ms, result.compute_ms) == (1_000.0, 500.0)


def test_filters_and_exclusions_bound_the_answer(bundle) -> None:
    """Only what the filters allow and nobody excluded comes back, fewer than k if need be."""
    request = build_request(
        excluded_item_ids=("i4", "i1", "nothing"),
        filters=Filters(categories=("even",), allowed_item_ids=("i2", "i3", "i4", "i6")),
    )

    assert set(rank(load(bundle), request).item_ids) == {"i2", "i6"}


def test_a_long_history_is_cut_by_whole_strides(bundle) -> None:
    """At most the newest max_items are in the prompt, and the start moves by whole strides."""
    loaded = load(bundle)
    lengths = [
        rank(
            loaded, build_request(history_item_ids=tuple(f"i{index % 30}" for index in range(count)))
        ).num_prompt_tokens
        for count in (20, 21, 25, 26)
    ]

    assert lengths == [21, 17, 21, 17]


def test_the_warm_up_leaves_the_engine_empty(bundle) -> None:
    """After loading, nothing is in flight and no block is held."""
    engine = load(bundle).engine

    assert not engine.has_work
    assert engine.load() == LOAD


def test_it_loads_where_one_request_may_wait(bundle) -> None:
    """The least queue that the settings allow is shorter than what the warm-up asks at once, which is no reason to refuse the bundle."""
    loaded = load_bundle(bundle, EngineConfig(num_blocks=64, max_waiting=1, max_running=1), torch.float32, "cpu")

    assert len(rank(loaded, build_request()).item_ids) == 5


def test_a_prompt_window_beyond_the_decoder_is_refused(bundle) -> None:
    """A bundle whose prompts could outgrow the decoder's positions is corrupt."""
    too_long = dataclasses.replace(bundle, manifest={**bundle.manifest, "prompt": {"max_items": 64, "stride": 5}})

    with pytest.raises(BundleCorrupt, match="65 tokens, the decoder has 64 positions"):
        load(too_long)
