"""Selection: exact order by score, then by number, on any scores and with any padding."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.llm.engine.selection import choose_first, choose_next, top_by_score
from services.llm.engine.survivors import SurvivorMasks
from services.llm.engine.trie import ItemCodes, Trie

SCORES = st.sampled_from([-float("inf"), -1e30, -2.5, -1.0, -1e-30, -0.0, 0.0, 1e-40, 3.25, 1e30])


@given(st.lists(SCORES, min_size=1, max_size=40), st.data())
def test_the_order_is_by_score_then_by_number(scores, data) -> None:
    """Infinities, denormals and both zeros included, the order is that of a stable sort."""
    numbers = data.draw(st.permutations(range(len(scores))))
    count = data.draw(st.integers(1, len(scores)))

    places = top_by_score(torch.tensor([scores]), torch.tensor([numbers]), count)

    wanted = sorted(range(len(scores)), key=lambda place: (-scores[place], numbers[place]))[:count]
    assert places[0].tolist() == wanted


def build_trie() -> Trie:
    """Build six items of depth 2: codes ab, aa, ba, ab (shared), bb, cc over sizes 3 and 3."""
    codes = np.array([[0, 1], [0, 0], [1, 0], [0, 1], [1, 1], [2, 2]])
    return Trie(ItemCodes(codes=codes, level_sizes=(3, 3), token_offsets=(1, 4)), torch.device("cpu"))


def test_the_first_level_skips_what_leads_nowhere() -> None:
    """A node with no allowed item below it is never chosen, whatever its score."""
    trie = build_trie()
    survivors = SurvivorMasks(trie).of(np.array([False, False, True, False, False, True]), np.zeros(0, dtype=np.int64))

    chosen = choose_first(trie.levels[0], torch.tensor([[0.0, -2.0, -1.0]]), survivors.bits_by_level[0][None], 2)

    assert chosen.child_RN.tolist() == [[2, 1]]
    assert chosen.score_RN.tolist() == [[-1.0, -2.0]]


def test_items_of_one_code_stay_apart_and_ties_go_to_the_smaller_index() -> None:
    """Two items that share a code both come, in index order, and a padded beam gives nothing."""
    trie = build_trie()
    alive = torch.tensor([[0b111111]], dtype=torch.uint8)
    nodes, scores = torch.tensor([[1, 0, 0]]), torch.tensor([[-1.0, -1.0, -torch.inf]])
    logp = torch.tensor([[[-1.0, -3.0, -9.0], [-2.0, -1.0, -9.0], [0.0, 0.0, 0.0]]])

    chosen = choose_next(trie.levels[1], nodes, scores, logp, alive, 6)

    assert chosen.child_RN[0, :5].tolist() == [0, 2, 3, 1, 4]
    assert chosen.score_RN[0].tolist() == [-2.0, -2.0, -2.0, -3.0, -4.0, -torch.inf]
    assert chosen.parent_RN[0, :5].tolist() == [1, 0, 1, 1, 0]
