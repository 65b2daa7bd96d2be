"""The chunked loss and its gradients equal torch's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipelines.training.target.positions import position_loss
from pipelines.training.target.sampled import ItemSampler
from pipelines.training.target.softmax import Teacher, catalogue_loss, first_places, next_unseen, seen_before

NUM_ITEMS, SIZE, NUM_TOKENS = 40, 8, 1_100


def make() -> tuple[Tensor, Tensor, Tensor, Teacher]:
    """Build hidden states, head, labels and a teacher; more tokens than a chunk holds."""
    torch.manual_seed(0)
    hidden, head = torch.randn(NUM_TOKENS, SIZE, requires_grad=True), torch.randn(NUM_ITEMS, SIZE, requires_grad=True)
    labels = torch.randint(0, NUM_ITEMS, (NUM_TOKENS,))
    return hidden, head, labels, Teacher(torch.randn(NUM_TOKENS, 5), torch.randn(NUM_ITEMS, 5), 0.7)


@pytest.mark.parametrize("has_teacher", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scores_at_once", [1 << 20, 300])
def test_loss_and_gradients_equal_torch_own(has_teacher, masked, scores_at_once, monkeypatch) -> None:
    """The chunked loss equals the cross-entropy over all, or all unseen, items; seen items get no gradient.

    This also holds for chunks of few rows, as with a large catalogue.
    """
    monkeypatch.setattr("pipelines.training.target.softmax._CHUNK_SCORES", scores_at_once)
    hidden_TD, head, labels_T, teacher = make()
    seen, is_seen = None, torch.zeros(NUM_TOKENS, NUM_ITEMS, dtype=torch.bool)
    if masked:
        labels_BL = torch.stack([torch.randperm(NUM_ITEMS)[:20] for _ in range(3)])
        chosen_BL = next_unseen(labels_BL, torch.ones_like(labels_BL, dtype=torch.bool))
        seen, labels_T = seen_before(labels_BL, chosen_BL, NUM_ITEMS), labels_BL[chosen_BL]
        teacher = Teacher(teacher.hidden_TE[: len(labels_T)], teacher.head_VE, 0.7)
        is_seen = is_seen[: len(labels_T)]
        for token in range(len(labels_T)):
            is_seen[token, labels_BL[token // 20, : token % 20]] = True
    used_TD = hidden_TD[: len(labels_T)]
    target = functional.one_hot(labels_T, NUM_ITEMS).float()
    if has_teacher:
        answer = (teacher.hidden_TE @ teacher.head_VE.T).masked_fill(is_seen, -torch.inf).softmax(1)
        target = 0.3 * target + 0.7 * answer
    plain = -(target * (used_TD @ head.T).masked_fill(is_seen, -1e9).log_softmax(1)).sum(1).mean()

    fused = catalogue_loss(used_TD, head, labels_T, seen, teacher if has_teacher else None)

    assert fused.item() == pytest.approx(plain.item(), rel=1e-5)
    for gradient, other in zip(
        *(torch.autograd.grad(2 * loss, [hidden_TD, head]) for loss in (fused, plain)), strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)


def test_repeats_and_padding_are_not_learned() -> None:
    """Repeats and non-labels are not learned; items of weak events count as seen."""
    is_label = torch.tensor([[True, False, True, True, True, True]])

    chosen = next_unseen(torch.tensor([[3, 1, 3, 2, 1, -1]]), is_label)

    assert chosen.tolist() == [[True, False, False, True, False, False]]


def test_first_places_are_where_an_item_comes_first() -> None:
    """An absent item has the row's length, and padding is ignored, also for item 0."""
    places = first_places(torch.tensor([[2, 1, 2, -1], [0, -1, -1, -1]]), 3)

    assert places.tolist() == [[4.0, 1.0, 0.0], [0.0, 4.0, 4.0]]


def test_certain_model_that_is_wrong_has_a_finite_loss() -> None:
    """Vanishing probabilities give a finite loss and gradients."""
    hidden, head = torch.tensor([[100.0, 0.0]], requires_grad=True), torch.tensor([[10.0, 0.0], [-10.0, 0.0]])

    loss = catalogue_loss(hidden, head.requires_grad_(), torch.tensor([1]))

    assert torch.isfinite(loss)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(loss, [hidden, head]))


@pytest.mark.parametrize("has_teacher", [False, True])
@pytest.mark.parametrize("mask_seen", [False, True])
def test_a_sample_of_everything_is_the_whole_softmax(has_teacher: bool, mask_seen: bool) -> None:
    """If every item is drawn, the sampled loss and gradients equal the full ones, with repeats and masks."""
    _, head, _, teacher = make()
    labels_BL = torch.randint(0, NUM_ITEMS, (3, 20))
    hidden_BLD = torch.randn(3, 20, SIZE, requires_grad=True)
    teacher = replace(teacher, hidden_TE=torch.randn(3, 20, 5)) if has_teacher else None
    is_label_BL = torch.ones_like(labels_BL, dtype=torch.bool)
    losses = [
        position_loss(hidden_BLD, head, labels_BL, is_label_BL, mask_seen=mask_seen, sampler=sampler, teacher=teacher)
        for sampler in (None, ItemSampler(np.arange(NUM_ITEMS), NUM_ITEMS))
    ]

    (whole, num_labels), (sampled, num_sampled) = losses
    assert num_labels == num_sampled
    assert sampled.item() == pytest.approx(whole.item(), rel=1e-5)
    for gradient, other in zip(*(torch.autograd.grad(loss, [hidden_BLD, head]) for loss, _ in losses), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)


def test_the_logq_correction_keeps_the_sum_over_items() -> None:
    """The mean over draws of the sum weighted by inverse probability equals the sum over the catalogue."""
    torch.manual_seed(0)
    sampler, weight_V = ItemSampler(np.arange(NUM_ITEMS) ** 2, 12), torch.rand(NUM_ITEMS)
    draws = [sampler.draw(torch.device("cpu")) for _ in range(4_000)]

    sums = torch.stack([(weight_V[draw.items_S] / draw.log_q_S.exp()).sum() for draw in draws])

    assert float(sampler.rate_V.sum()) == pytest.approx(12, rel=1e-4)
    assert float(sums.mean()) == pytest.approx(float(weight_V.sum()), abs=4 * float(sums.std()) / 4_000**0.5)


@pytest.mark.parametrize("has_teacher", [False, True])
def test_a_weighted_loss_is_that_of_repeated_labels(has_teacher: bool) -> None:
    """A label of weight 2 equals the label twice in loss and gradients; weights of 1 change nothing."""
    torch.manual_seed(0)
    head, labels = torch.randn(7, 4), torch.tensor([1, 3, 6])
    hidden = torch.randn(3, 4)
    places = torch.tensor([0, 1, 1, 2])

    def of(rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the summed loss over these rows, and the gradient of the output matrix."""
        own = head.clone().requires_grad_()
        teacher = Teacher(hidden[rows], head.flip(0), 0.4) if has_teacher else None
        loss = catalogue_loss(hidden[rows], own, labels[rows], None, teacher, weights) * len(rows)
        loss.backward()  # type: ignore[no-untyped-call]
        assert own.grad is not None
        return loss.detach(), own.grad

    plain, even = of(torch.arange(3), None), of(torch.arange(3), torch.ones(3))
    weighted, repeated = of(torch.arange(3), torch.tensor([1.0, 2.0, 1.0])), of(places, None)

    torch.testing.assert_close(weighted, repeated)
    torch.testing.assert_close(even, plain)
