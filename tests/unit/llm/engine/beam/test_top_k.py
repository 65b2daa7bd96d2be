"""Top-k selection: exact order by score, then by number, for any scores and any padding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.llm.engine.beam.item_mask import ItemMasks
from services.llm.engine.beam.top_k import choose_next, top_by_score
from services.llm.engine.beam.trie import ItemCodes, Trie

SCORES = st.sampled_from([-float("inf"), -1e30, -2.5, -1.0, -1e-30, -0.0, 0.0, 1e-40, 3.25, 1e30])


@given(st.lists(SCORES, min_size=1, max_size=40), st.data())
def test_the_order_is_by_score_then_by_number(scores, data) -> None:
    """The order equals a stable sort, including infinities, denormals and both zeros."""
    numbers = data.draw(st.permutations(range(len(scores))))
    count = data.draw(st.integers(1, len(scores)))

    places = top_by_score(torch.tensor([scores]), torch.tensor([numbers]), count)

    wanted = sorted(range(len(scores)), key=lambda position: (-scores[position], numbers[position]))[:count]
    assert places[0].tolist() == wanted


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("skew", [1.0, 6.0])
@pytest.mark.parametrize("num_beams", [1, 40])
def test_the_choice_is_that_of_a_plain_search(num_requests, skew, num_beams) -> None:
    """The selection equals a plain search that normalises each beam's scores over all children of its node."""
    rng = np.random.default_rng(num_beams)
    codes = (9 * rng.random((2_000, 3)) ** skew).astype(int)
    items = ItemCodes(codes=codes, level_sizes=(9,) * 3, token_offsets=(1, 10, 19))
    trie = Trie(items, torch.device("cpu"))
    masks = [ItemMasks(trie).of(rng.random(2_000) < 0.3, np.zeros(0, dtype=np.int64)) for _ in range(num_requests)]

    for index, level in enumerate(trie.levels[1:], start=1):
        num_nodes = len(level.starts) - 1
        beams = min(num_beams, num_nodes)
        nodes = torch.from_numpy(np.stack([rng.permutation(num_nodes)[:beams] for _ in range(num_requests)]))
        scores = torch.from_numpy(rng.integers(-4, 0, (num_requests, beams)).astype(np.float32))
        scores[0, 1:] = scores[0, 1:].masked_fill(torch.arange(1, beams) % 3 == 0, -torch.inf)
        logits = torch.from_numpy(rng.integers(-4, 0, (num_requests, beams, 9)).astype(np.float32))
        bits = torch.stack([mask.bits_by_level[index] for mask in masks])

        chosen = choose_next(level, nodes, scores, logits, bits, 50)

        for request in range(num_requests):
            alive = np.unpackbits(bits[request].numpy(), bitorder="little")
            wanted = {}
            for beam, node in enumerate(nodes[request].tolist()):
                below = range(level.starts[node], level.starts[node + 1])
                log_sum = torch.logsumexp(logits[request, beam, level.codes[below.start : below.stop].long()], 0)
                for edge in below:
                    if alive[level.children[edge]] and scores[request, beam] > -torch.inf:
                        score = scores[request, beam] + logits[request, beam, level.codes[edge]] - log_sum
                        wanted[beam, int(level.children[edge])] = float(score)
            columns = (x[request].tolist() for x in (chosen.score_RN, chosen.child_RN, chosen.parent_RN))
            ranked = [candidate for candidate in zip(*columns, strict=True) if candidate[0] > -np.inf]
            best = sorted(wanted.values(), reverse=True)[:50]
            assert ranked == sorted(ranked, key=lambda candidate: (-candidate[0], candidate[1]))
            assert len({child for _, child, _ in ranked}) == len(ranked)
            assert [score for score, _, _ in ranked] == pytest.approx(best, abs=1e-5)
            assert all(score == pytest.approx(wanted[parent, child], abs=1e-5) for score, child, parent in ranked)
