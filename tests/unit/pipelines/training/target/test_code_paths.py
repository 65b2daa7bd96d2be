"""The loss over code paths equals the engine oracle's scores, and only existing codes count."""

import numpy as np
import pytest
import torch

from models.catalogue import BOS_TOKEN, Catalogue
from models.decoder.decoder import Decoder
from models.prompt import Prompt
from pipelines.data.labelled import Weighted
from pipelines.scoring.beams import BeamScorer
from pipelines.training.batches import make_batch
from pipelines.training.target.code_paths import CodePaths
from pipelines.training.train_decoder import next_token_loss
from services.llm.engine.beam.trie import ItemCodes
from tests.support.engine.engines import build_decoder, exhaustive_ranking

CPU = torch.device("cpu")
SIZES = (4, 5, 6)


def make(num_items: int = 30) -> tuple[Catalogue, ItemCodes, Decoder]:
    """Return a catalogue of unique codes of depth 3 with an unused first-level code, and a decoder over it."""
    rng = np.random.default_rng(2)
    paths = np.argwhere(np.ones((SIZES[0] - 1, *SIZES[1:])))
    codes = rng.permutation(paths)[:num_items].astype(np.int32)
    ids = tuple(f"i{index}" for index in range(num_items))
    catalogue = Catalogue(ids, ids, ((),) * num_items, codes, SIZES, np.ones(num_items))
    items = ItemCodes(codes=codes, level_sizes=SIZES, token_offsets=catalogue.token_offsets)
    return catalogue, items, build_decoder(items)


@pytest.mark.parametrize(("mask_seen", "num_codes"), [(False, 18), (True, 15)])
def test_an_items_loss_is_its_score_by_exhaustive_search(mask_seen: bool, num_codes: int) -> None:
    """An item's loss is minus its log-probability per level, also by beam search; masked repeats are skipped."""
    catalogue, items, decoder = make()
    windows = [np.array([3, 7, 7, 12]), np.array([20, 1])]

    with torch.inference_mode():
        loss, number = next_token_loss(
            decoder, catalogue, make_batch(windows, catalogue), mask_seen=mask_seen, paths=CodePaths(catalogue, CPU)
        )

    scored, by_beams, scorer = [], [], BeamScorer(decoder, catalogue, Prompt(8, 2), width=30)
    for window in windows:
        for position, item in enumerate(window.tolist()):
            if mask_seen and item in window[:position]:
                continue
            prompt = [BOS_TOKEN, *catalogue.tokens(window[:position])]
            ranked, scores = exhaustive_ranking(decoder, items, prompt, np.ones(30, dtype=bool), 30)
            scored.append(scores[ranked.index(item)])
            row = scorer([window[:position]])[0]
            assert np.exp(row).sum() == pytest.approx(1, abs=1e-4)
            by_beams.append(row[item])
    assert number == num_codes
    assert loss.item() == pytest.approx(-np.mean(scored) / 3, rel=1e-5)
    np.testing.assert_allclose(by_beams, scored, rtol=1e-4)


def test_a_code_in_no_item_is_not_learned_from() -> None:
    """Unused codes get no gradient, and masked or padded labels are ignored."""
    catalogue, _, decoder = make()
    alone = make_batch([np.array([3, 7, 12])], catalogue)
    masked = make_batch([Weighted(np.array([3, 7, 12, 5]), np.array([1.0, 1.0, 1.0, 0.0])), np.array([2])], catalogue)
    masked.is_label[1] = False

    def learned(batch):
        loss, number = next_token_loss(decoder, catalogue, batch, mask_seen=False, paths=CodePaths(catalogue, CPU))
        return loss.item(), number, torch.autograd.grad(loss, decoder.embedding.weight)[0]

    (loss, number, grad_VD), (loss_masked, number_masked, _) = learned(alone), learned(masked)

    assert (number, number_masked) == (9, 9)
    assert loss_masked == pytest.approx(loss, rel=1e-5)
    unused = catalogue.token_offsets[0] + SIZES[0] - 1
    assert grad_VD[unused].abs().max() == 0
    assert grad_VD[catalogue.token_offsets[0] : unused].abs().min() > 0
