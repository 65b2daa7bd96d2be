"""Splitting a decoder and a batch over pipeline stages; tests/integration/pipelines/test_workers.py runs the stages."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.decoder.decoder import Decoder
from pipelines.scoring.dense import hidden_states
from pipelines.training.batches import IGNORED, Batch
from pipelines.training.parallel.pipeline import DecoderStage, layers_of, micro_batches_of, stage_of
from services.errors import ConfigError
from tests.support.training.bundles import build_decoder


@given(st.integers(1, 40), st.integers(1, 9), st.integers(2, 5))
def test_micro_batches_have_all_rows_once_and_one_size(num_rows: int, length: int, num_stages: int) -> None:
    """There are one to four micro-batches per stage; padding rows come last, without labels or length."""
    tokens_BL = torch.arange(2, 2 + num_rows * length).view(num_rows, length)
    batch = Batch(tokens_BL, tokens_BL + 1, tokens_BL > 0, (length,) * num_rows)

    parts = micro_batches_of(batch, num_stages)

    assert num_stages <= len(parts) <= 4 * num_stages
    assert len({len(part.tokens) for part in parts}) == 1
    assert torch.equal(torch.cat([part.tokens for part in parts])[:num_rows], tokens_BL)
    assert torch.equal(torch.cat([part.is_label for part in parts])[:num_rows], batch.is_label)
    filling = Batch(
        *(torch.cat([getattr(part, name) for part in parts])[num_rows:] for name in ("tokens", "labels", "is_label")),
        (),
    )
    assert not filling.is_label.any()
    assert (filling.labels == IGNORED).all()
    assert sum(sum(part.lengths) for part in parts) == num_rows * length


@given(st.integers(1, 40), st.integers(1, 40))
def test_layers_are_divided_without_gap_or_overlap(num_layers: int, num_stages: int) -> None:
    """Layers are assigned in order, and each layer's parameters belong to its stage."""
    stages = [layers_of(num_layers, stage, num_stages) for stage in range(num_stages)]

    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    for stage, layers in enumerate(stages):
        assert all(stage_of(f"layers.{layer}.q.weight", num_layers, num_stages) == stage for layer in layers)


@pytest.mark.parametrize("is_tied", [True, False])
def test_stages_one_after_another_are_the_decoder(is_tied: bool) -> None:
    """Hidden states are bitwise equal, and parameters are on one stage except for tied embeddings."""
    whole = build_decoder(40, 0)
    if not is_tied:
        whole = Decoder(replace(whole.config, tie_word_embeddings=False))
    stages = [DecoderStage(copy.deepcopy(whole), stage, 2) for stage in range(2)]
    tokens_BL = torch.randint(1, 40, (3, 5))

    with torch.no_grad():
        stages[1].entering_TD = hidden_states(stages[0], tokens_BL)
        found_TD = hidden_states(stages[1], tokens_BL)
        expected_TD = hidden_states(whole, tokens_BL)

    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert torch.equal(found_TD, expected_TD)
    assert set(names) == {name for name, _ in whole.named_parameters()}
    assert {name for name in names if names.count(name) > 1} == ({"embedding.weight"} if is_tied else set())


def test_a_loss_that_runs_the_decoder_twice_is_refused_with_the_option() -> None:
    """The input from the previous stage is available only once per batch."""
    last = DecoderStage(build_decoder(40, 0), 1, 2)
    last.entering_TD = torch.zeros(15, last.config.hidden_size)
    tokens_BL = torch.ones(3, 5, dtype=torch.long)
    hidden_states(last, tokens_BL)

    with pytest.raises(ConfigError, match="--parallel: a pipeline is for losses that run the decoder once"):
        hidden_states(last, tokens_BL)
