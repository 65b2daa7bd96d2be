"""The trained readers of wishes that the benchmark compares."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.wishes.llm import answer_of, wants_of
from benchmarks.wishes.trained import Tuned, _fit, _summary
from models.wishes.clauses import Polarity
from models.wishes.vocabulary import Vocabulary, WishItem
from pipelines.wishes.generate import Wish

_NUM_TEXTS = 6


class _Letters(nn.Module):
    """An encoder with a vector for each letter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(30, 8)

    def forward(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        kept = mask_BL[..., None].float()
        return functional.normalize((self.rows(ids_BL) * kept).sum(1), dim=-1)


class _Tokenizer:
    def encode_batch(self, texts: list[str]) -> list[Any]:
        length = max(map(len, texts))
        rows = [[ord(letter) - ord("a") for letter in text] for text in texts]
        return [
            SimpleNamespace(
                ids=row + [0] * (length - len(row)), attention_mask=[1] * len(row) + [0] * (length - len(row))
            )
            for row in rows
        ]


def _tuned() -> tuple[Tuned, np.ndarray]:
    draw = np.random.default_rng(0)
    items_VD = draw.normal(size=(20, 8)).astype(np.float32)
    items_VD /= np.linalg.norm(items_VD, axis=1, keepdims=True)
    return Tuned(_Letters(), _Tokenizer(), items_VD), items_VD  # type: ignore[arg-type]


def test_an_untrained_reader_ranks_by_cosine() -> None:
    """The map of item vectors starts as the identity, so that training starts from the shipped encoder's order."""
    tuned, items_VD = _tuned()
    with torch.inference_mode():
        logs_V = tuned(["abc"])[0].numpy()
        vector_D = tuned.encoder(torch.tensor([[0, 1, 2]]), torch.ones(1, 3)).numpy()[0]
    assert np.argsort(-logs_V).tolist() == np.argsort(-(items_VD @ vector_D)).tolist()
    assert np.exp(logs_V).sum() == pytest.approx(1, abs=1e-5)


def test_training_raises_the_meant_items() -> None:
    """Steps on some texts raise the probability of each text's item."""
    tuned, _ = _tuned()
    texts = [chr(ord("a") + place) * 3 for place in range(_NUM_TEXTS)]
    labels = torch.arange(_NUM_TEXTS)
    with torch.inference_mode():
        before = tuned(texts)[labels, labels]
    _fit(tuned, [lambda: functional.nll_loss(tuned(texts), labels)] * 100)
    with torch.inference_mode():
        assert (tuned(texts)[labels, labels] > before).all()


def test_a_reader_of_some_wishes_is_compared_on_these_wishes_only() -> None:
    """The part that it closes and its difference come from the wishes that it read."""
    rows = [
        {"unread": 0.0, "shipped": 0.5, "oracle": 1.0, "cross": 0.75},
        {"unread": 0.2, "shipped": 0.2, "oracle": 0.2},
    ]
    found = _summary("cross", rows)
    assert (found["num_wishes"], found["ndcg10"], found["closed"]) == (1, 0.75, 0.75)
    assert found["change"] == pytest.approx([0.25, 0.25, 0.25])
    assert _summary("shipped", rows)["num_wishes"] == 2


def test_the_slots_of_a_wish_are_the_right_answer() -> None:
    """What a phrasing wants, refuses and takes as an example are the three lists that the LLM learns to write."""
    given = {"a": "comedy", "date": "1990s", "x": "horror", "title": "Paper Moons"}
    wish = Wish("turn", 0, "", (), np.zeros(1, dtype=bool), np.zeros(1, dtype=bool), given)
    assert answer_of(wish) == '{"must": ["comedy", "1990s"], "must_not": ["horror"], "liked": ["Paper Moons"]}'


def test_the_words_of_an_answer_count_as_words_of_clauses() -> None:
    """An answer's words become values, dates and examples of the catalogue with the polarity of their list."""
    titles = [("Paper Moons (1996)", "Comedy"), ("Blue Canyon (1958)", "Horror")]
    items = [WishItem(str(number), title, (value,)) for number, (title, value) in enumerate(titles)]
    wants = wants_of(Vocabulary(items), {"must": ["comedies", "90s"], "must_not": ["scary"], "liked": ["Paper Moons"]})
    assert {term.value: polarity for term, (polarity, _) in wants.values.items()} == {
        "Comedy": Polarity.WANT,
        "Horror": Polarity.AVOID,
    }
    assert [dates.label for _, dates, _ in wants.dates] == ["1990s"]
    assert wants.examples == {0: (Polarity.LIKE, 1.0)}
