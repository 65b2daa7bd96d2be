"""Training: the learning rate, averaged weights, dropout, and the best validation is kept."""

import numpy as np
import pytest
import torch
from torch import nn

from models.decoder.decoder import Decoder
from pipelines.training.batches import Batch
from pipelines.training.dense import DecoderScorer, hidden_states
from pipelines.training.fitting import Descent, DescentOptions, FitOptions, dropout_after, fit, rate_at
from pipelines.training.train import TrainOptions, new_decoder
from tests.support.bundles import build_catalogue

DESCENT = DescentOptions(learning_rate=0.1, weight_decay=0.0, warm_up=0.1, average=0.9)
NOTHING = Batch(*(np.zeros((1, 1), dtype=kind) for kind in (np.int64, np.int64, np.bool_)))


def small_decoder() -> Decoder:
    """A decoder with fresh weights over 30 items."""
    return new_decoder(build_catalogue(), TrainOptions(hidden_size=16, num_heads=2, feed_forward=32, max_items=20))


def test_rate_rises_then_falls_to_nothing() -> None:
    """Linear up to the peak at the end of the warm-up, half a cosine down."""
    assert rate_at(0.0, 0.1) < 0.05
    assert rate_at(0.1, 0.1) == pytest.approx(1.0)
    assert rate_at(0.55, 0.1) == pytest.approx(0.5)
    assert rate_at(1.0, 0.1) == pytest.approx(0.0, abs=1e-9)


def test_averaged_weights_are_carried_only_inside_the_block() -> None:
    """Validation uses the average; training continues from the weights themselves."""
    model = nn.Linear(2, 1, bias=False)
    descent = Descent(model, DESCENT)
    for step in range(20):
        descent.step(model(torch.ones(1, 2)).pow(2).sum(), step / 20)
    held = model.weight.detach().clone()

    with descent.averaged():
        averaged = model.weight.detach().clone()

    assert not torch.equal(averaged, held)
    assert torch.equal(model.weight, held)


def test_best_validation_is_kept_whatever_came_later() -> None:
    """The model ends with the weights that validated best, in inference mode."""
    model = nn.Linear(1, 1, bias=False)
    scores, carried = iter([0.1, 0.9, 0.3]), []

    def validate() -> float:
        carried.append(model.weight.detach().clone())
        return next(scores)

    curve = fit(
        model,
        batches=lambda: [NOTHING],
        loss=lambda _: (model(torch.ones(1, 1)) - 5).pow(2).sum(),
        validate=validate,
        options=FitOptions(epochs=3, validate_every=1, descent=DESCENT),
        progress=lambda *_: None,
    )

    assert torch.equal(model.weight, carried[1])
    assert [point["validation"] for point in curve] == [0.1, 0.9, 0.3]
    assert not model.training


def test_dropout_is_there_in_training_only_and_gone_afterwards() -> None:
    """Inside the block a training module drops, the same module in inference does not; outside nothing does."""
    layer, ones = nn.Identity(), torch.ones(1_000)

    with dropout_after([layer], 0.5):
        dropped = layer.train()(ones)
        judged = layer.eval()(ones)

    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert torch.equal(judged, ones)
    assert torch.equal(layer.train()(ones), ones)


def test_a_row_depends_on_its_own_earlier_tokens_alone() -> None:
    """Causality alone separates the rows of a padded batch: neither padding, nor a neighbour, nor a later item changes a state."""
    decoder, rows = small_decoder().eval(), torch.tensor([[0, 3, 4, 5], [0, 7, 0, 0], [0, 3, 4, 6]])

    states = hidden_states(decoder, rows).view(3, 4, -1)

    torch.testing.assert_close(states[1, :2], hidden_states(decoder, rows[1:2, :2]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[0, :3], states[2, :3])
    assert not torch.allclose(states[0, 3], states[2, 3])


def test_scorer_reads_the_prompt_that_serving_makes() -> None:
    """A long history is cut by whole strides: items before the window change nothing, those in it do."""
    scorer = DecoderScorer(small_decoder(), build_catalogue(), max_items=20, stride=5)
    history = np.arange(23) % 30

    before, inside = history.copy(), history.copy()
    before[4], inside[5] = 29, 29
    scores, same, changed = scorer([history, before, inside])

    np.testing.assert_allclose(scores, same, rtol=1e-5)
    assert not np.allclose(scores, changed)
