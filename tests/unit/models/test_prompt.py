"""Prompts are cut by whole strides, so a growing history keeps its prompt prefix for a stride of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.catalogue import BOS_TOKEN
from models.prompt import Prompt, window_start
from tests.support.training.bundles import build_catalogue

WINDOWS = st.tuples(st.integers(1, 60), st.integers(1, 60)).filter(lambda window: window[1] <= window[0])


@given(st.integers(0, 500), WINDOWS)
def test_the_window_keeps_the_newest_and_moves_by_whole_strides(num_items, window) -> None:
    """The window keeps at most max_items and starts at the smallest sufficient multiple of the stride."""
    max_items, stride = window
    start = window_start(num_items, max_items, stride)

    assert num_items - start <= max_items
    assert start % stride == 0
    assert start == 0 or num_items - (start - stride) > max_items


@pytest.mark.parametrize("num_items", [0, 1, 7, 8])
def test_a_prompt_begins_with_the_beginning_and_spells_each_item(num_items) -> None:
    """The BOS token comes first, then the tokens of the kept items, oldest first."""
    catalogue = build_catalogue()
    history = list(range(10, 10 + num_items))

    tokens = Prompt(max_items=7, stride=3).tokens(catalogue, history)

    assert tokens == [BOS_TOKEN, *catalogue.tokens(history[3 if num_items == 8 else 0 :])]
