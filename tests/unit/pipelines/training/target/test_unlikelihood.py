"""The loss of disliked items is -log(1 - p(item | history)), against torch's gradients, for codes of any depth."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from models.catalogue import BOS_TOKEN
from pipelines.data.labelled import Dislikes, Weighted
from pipelines.training.batches import Batch, Disliked, make_batch, split_batch
from pipelines.training.target.code_paths import CodePaths
from pipelines.training.target.positions import position_loss
from pipelines.training.target.sampled import ItemSampler
from pipelines.training.target.unlikelihood import log_odds, unlikelihood
from pipelines.training.train_decoder import next_token_loss
from tests.support.engine.engines import exhaustive_ranking
from tests.unit.pipelines.training.target.test_code_paths import CPU, make

NUM_ITEMS, SIZE = 40, 8


@settings(max_examples=30, deadline=None)
@given(
    depth=st.integers(1, 4), number=st.integers(1, 9), scale=st.sampled_from([0.1, 1.0, 4.0]), seed=st.integers(0, 99)
)
def test_loss_and_gradients_are_those_of_the_plain_form(depth: int, number: int, scale: float, seed: int) -> None:
    """Loss and gradients equal the log of the other paths' softmaxes in float64."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(number, depth, SIZE, generator=draw, requires_grad=True)
    heads = [torch.mul(torch.randn(5 + level, SIZE, generator=draw), scale).requires_grad_() for level in range(depth)]
    codes = torch.stack([torch.randint(5 + level, (number,), generator=draw) for level in range(depth)], dim=1)
    weights = torch.rand(number, generator=draw) * 3

    computed = unlikelihood(
        torch.stack([log_odds(hidden[:, level], head, codes[:, level]) for level, head in enumerate(heads)], dim=1),
        weights,
    )

    # 1 - p is added up from the other paths: subtracted from 1, it would lose its digits where p is close to 1.
    prefix, others = torch.ones(number, 1, dtype=torch.float64), torch.zeros(number, dtype=torch.float64)
    for level, head in enumerate(heads):
        shares, code = (hidden[:, level].double() @ head.double().T).softmax(1), codes[:, level : level + 1]
        others = others + (prefix * shares.scatter(1, code, 0.0)).sum(1)
        prefix = prefix * shares.gather(1, code)
    plain = -(weights * torch.log(others)).sum()
    assert computed.item() == pytest.approx(plain.item(), rel=1e-4, abs=1e-12)
    for gradient, other in zip(
        *(torch.autograd.grad(loss, [hidden, *heads]) for loss in (computed, plain)), strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("certain", [20.0, 90.0, 1_000.0])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_item_that_is_all_but_certain_has_a_finite_loss_and_a_bounded_gradient(certain: float, depth: int) -> None:
    """For p close to 1 the loss is the score difference with gradients of at most 1; for p close to 0 it is 0."""
    scores = torch.zeros(depth, 4)
    scores[:, 1] = certain
    head, codes = scores.clone().requires_grad_(), torch.ones(1, depth, dtype=torch.long)
    hidden = functional.one_hot(torch.arange(depth)).float().unsqueeze(0)
    parts = [log_odds(hidden[:, level, :], head.T, codes[:, level]) for level in range(depth)]

    loss = unlikelihood(torch.stack(parts, dim=1), torch.ones(1))
    loss.backward()  # type: ignore[no-untyped-call]

    assert head.grad is not None
    assert loss.item() == pytest.approx(certain - math.log(3 * depth), rel=1e-5)
    assert head.grad.isfinite().all()
    assert head.grad.abs().max() <= 1 + 1e-5
    assert head.grad[:, 1].sum() == pytest.approx(1, abs=1e-4)
    assert unlikelihood(torch.full((1, depth), -200.0), torch.ones(1)).item() == 0


def test_items_that_share_the_first_codes_are_hardly_touched() -> None:
    """A disliked path loses probability mainly to other codes below its own prefix."""
    scores = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    hidden, codes = torch.eye(2).unsqueeze(0), torch.tensor([[0, 1]])
    odds = torch.stack([log_odds(hidden[:, level], scores.T, codes[:, level]) for level in range(2)], dim=1)

    (whole,) = torch.autograd.grad(unlikelihood(odds, torch.ones(1)), scores, retain_graph=True)
    (by_level,) = torch.autograd.grad(unlikelihood(odds.T, torch.ones(2)), scores)

    assert 0 < whole[0, 0] < 0.1 * by_level[0, 0]
    assert whole[1, 1] > 0


def slow_loss(hidden: Tensor, head: Tensor, labels: Tensor, disliked: Disliked, *, mask_seen: bool) -> Tensor:
    """Return the sum of the dislikes' losses by loops over softmaxes of unseen items."""
    total = torch.zeros((), dtype=torch.float64)
    for row, position, item, weight in zip(*(part.tolist() for part in disliked.found()), strict=True):
        scores = head.double() @ hidden[row, position].double()
        seen = {label for label in labels[row, :position].tolist() if label >= 0 and mask_seen and label != item}
        kept = [index for index in range(len(head)) if index not in seen]
        p = scores[kept].softmax(0)[kept.index(item)]
        total = total - weight * torch.log1p(-p)
    return total


def drawn_rows() -> tuple[Tensor, Tensor, Tensor, Disliked]:
    """Build hidden states, head, labels of two padded rows, and dislikes of both, one padded."""
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 7, SIZE, requires_grad=True), torch.randn(NUM_ITEMS, SIZE, requires_grad=True)
    labels = torch.stack([torch.randperm(NUM_ITEMS)[:7] for _ in range(2)])
    labels[:, 6], labels[1, 5] = -1, -1
    spare = [item for item in range(NUM_ITEMS) if item not in labels]
    items = torch.tensor([[spare[0], spare[1], spare[0]], [spare[2], 0, 0]])
    return (
        hidden,
        head,
        labels,
        Disliked(items, torch.tensor([[0, 6, 3], [5, 0, 0]]), torch.tensor([[1.0, 2, 0.5], [1, 0, 0]])),
    )


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("mask_seen", [False, True])
def test_a_dislike_is_scored_by_the_history_before_it(mask_seen: bool, sampled: bool) -> None:
    """A dislike is scored at its position among unmasked items; sampling everything equals the full softmax."""
    hidden, head, labels, disliked = drawn_rows()
    sampler = ItemSampler(np.arange(NUM_ITEMS), NUM_ITEMS) if sampled else None
    is_label = torch.ones_like(labels, dtype=torch.bool)

    alone, num_labels = position_loss(hidden, head, labels, is_label, mask_seen=mask_seen, sampler=sampler)
    computed, number = position_loss(
        hidden, head, labels, is_label, mask_seen=mask_seen, sampler=sampler, disliked=disliked
    )

    plain = (alone.double() * num_labels + slow_loss(hidden, head, labels, disliked, mask_seen=mask_seen)) / number
    assert number == num_labels + 4
    assert computed.item() == pytest.approx(plain.item(), rel=1e-5)
    for gradient, other in zip(*(torch.autograd.grad(loss, [hidden, head]) for loss in (computed, plain)), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


def test_dislikes_without_weight_change_no_bit() -> None:
    """Zero-weight dislikes change nothing, and a dislike without alternatives has zero loss."""
    hidden, head, labels, disliked = drawn_rows()
    is_label = torch.ones_like(labels, dtype=torch.bool)
    none = Disliked(disliked.items, disliked.places, torch.zeros_like(disliked.weights))

    alone, without = (
        position_loss(hidden, head, labels, is_label, mask_seen=True, disliked=dislikes) for dislikes in (None, none)
    )
    only, _ = position_loss(
        hidden[:1, :2], head[:2], torch.tensor([[0, -1]]), torch.tensor([[False, False]]), mask_seen=True,
        disliked=Disliked(torch.tensor([[1]]), torch.tensor([[1]]), torch.ones(1, 1)),
    )  # fmt: skip

    assert (alone[0].item(), alone[1]) == (without[0].item(), without[1])
    assert only.item() == 0


def test_an_items_path_is_disliked_by_its_score_in_exhaustive_search() -> None:
    """At depth 3 a dislike's loss is -log(1 - exp(score)) of the item and counts as three codes."""
    catalogue, items, decoder = make()
    own = Weighted(np.array([3, 7, 12]), np.zeros(3), Dislikes(np.array([12]), np.array([2]), np.array([2.0])))

    loss, number = next_token_loss(
        decoder, catalogue, make_batch([own], catalogue), mask_seen=True, paths=CodePaths(catalogue, CPU)
    )

    prompt = [BOS_TOKEN, *catalogue.tokens([3, 7])]
    ranked, scores = exhaustive_ranking(decoder, items, prompt, np.ones(30, dtype=bool), 30)
    expected = -2 * math.log1p(-math.exp(scores[ranked.index(12)]))
    assert number == 3
    assert loss.item() * number == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_of_a_batch_add_up_to_the_whole(num_parts: int) -> None:
    """Gradients of the parts add up to the batch's, also for a part with only dislikes."""
    catalogue, _, decoder = make()
    paths = CodePaths(catalogue, CPU)
    alone = Weighted(np.array([5, 9]), np.zeros(2), Dislikes(np.array([9]), np.array([1]), np.array([3.0])))
    batch = make_batch([np.array([3, 7, 12]), alone, np.array([20, 1])], catalogue)

    def learned(part: Batch) -> tuple[Tensor, int]:
        loss, number = next_token_loss(decoder, catalogue, part, mask_seen=True, paths=paths)
        return torch.autograd.grad(loss, decoder.embedding.weight)[0] * number, number

    whole, number = learned(batch)
    parts = [learned(part) for part in split_batch(batch, num_parts)]

    assert sum(part for _, part in parts) == number
    torch.testing.assert_close(sum(grad for grad, _ in parts), whole, rtol=1e-4, atol=1e-5)
