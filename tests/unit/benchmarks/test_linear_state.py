"""The gated delta rule against a naive loop, and the delta decoder's state."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.quality.delta_decoder import DeltaDecoder
from benchmarks.quality.delta_rule import CHUNK_TOKENS, delta_rule, delta_step
from benchmarks.quality.linear_state import costs, summarise
from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from pipelines.scoring.dense import hidden_states
from pipelines.training.train_decoder import draw_weights

_CONFIG = DecoderConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=100,
)


def _inputs(length: int) -> tuple[Tensor, ...]:
    """Return a state (B, H, V, K), then q, k, v, write and log decay."""
    torch.manual_seed(length)
    rows, heads, keys, values = 2, 3, 8, 5
    q, k = (functional.normalize(torch.randn(rows, heads, length, keys), dim=-1) for _ in range(2))
    write, log_decay = torch.rand(rows, heads, length), -torch.rand(rows, heads, length)
    return (
        torch.randn(rows, heads, values, keys),
        q,
        k,
        torch.randn(rows, heads, length, values),
        write,
        log_decay,
    )


def _naive(state: np.ndarray, *parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs (L, V) and the last state of one row and head, as the formula is written, in float64."""
    outputs = []
    for q, k, v, write, log_decay in zip(*parts, strict=True):
        decayed = np.exp(log_decay) * state
        state = decayed + write * np.outer(v - decayed @ k, k)
        outputs.append(state @ q)
    return np.array(outputs), state


@pytest.mark.parametrize("length", [1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS - 5])
def test_chunks_equal_single_steps_and_a_naive_loop(length: int) -> None:
    """Outputs and last state agree within 1e-5 in fp32, also if the last chunk is shorter."""
    state, *parts = _inputs(length)
    chunked, last = delta_rule(state, *parts)
    stepped, outputs = state, []
    for position in range(length):
        output, stepped = delta_step(stepped, *(part[:, :, position] for part in parts))
        outputs.append(output)
    torch.testing.assert_close(torch.stack(outputs, dim=2), chunked, atol=1e-5, rtol=0)
    torch.testing.assert_close(stepped, last, atol=1e-5, rtol=0)
    for row, head in np.ndindex(2, 3):
        expected, after = _naive(*(part[row, head].double().numpy() for part in (state, *parts)))
        np.testing.assert_allclose(chunked[row, head].numpy(), expected, atol=1e-5)
        np.testing.assert_allclose(last[row, head].numpy(), after, atol=1e-5)


def _decoder() -> DeltaDecoder:
    torch.manual_seed(0)
    decoder = DeltaDecoder(_CONFIG)
    draw_weights(decoder)
    for layer in decoder.delta_layers:
        layer.draw_gates()
    return decoder.eval()


@pytest.mark.parametrize("known", [1, 3, CHUNK_TOKENS])
def test_a_stored_state_and_new_events_equal_the_whole_history(known: int) -> None:
    """Events may arrive in any portions: the hidden states and the state equal one pass."""
    decoder, tokens = _decoder(), torch.randint(0, 50, (3, 100))
    whole, expected = decoder.advance(tokens)
    first, states = decoder.advance(tokens[:, :known])
    parts = [first]
    for position in range(known, 100):
        hidden, states = decoder.advance(tokens[:, position : position + 1], states)
        parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    for state, wanted in zip(states, expected, strict=True):
        torch.testing.assert_close(state.values, wanted.values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state.newest, wanted.newest, atol=1e-5, rtol=1e-5)


def test_padding_at_the_end_changes_no_earlier_position() -> None:
    """Training and scoring run rows of different lengths in one batch."""
    decoder, tokens = _decoder(), torch.randint(0, 50, (2, 90))
    padded = tokens.clone()
    padded[0, 40:] = 0
    own, other = (hidden_states(decoder, batch).view(2, 90, -1) for batch in (tokens, padded))
    torch.testing.assert_close(own[0, :40], other[0, :40], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own[1], other[1], atol=1e-5, rtol=1e-5)


def test_the_state_has_one_size_for_every_history() -> None:
    """The reported bytes of a user: 2 layers, 2 heads, 16 x 16 numbers and 3 x 32 x 3 inputs, 4 bytes each."""
    delta = _decoder()
    measured = costs(Decoder(_CONFIG), delta, prompts=(10, 100))
    assert measured["state_bytes"] == 2 * 4 * (2 * 16 * 16 + 3 * 32 * 3)
    assert [row["items"] for row in measured["prompts"]] == [10, 100]


def test_differences_are_paired_by_user_and_averaged_over_seeds() -> None:
    """Users who differ among each other, but by the same amount between decoders, give an interval of width 0."""
    levels = np.linspace(0, 1, 40)
    runs = [
        {
            "gains": {"softmax": {"test": levels + shift}, "delta": {"test": levels + shift - 0.1}},
            "training": {},
            "costs": {},
        }
        for shift in (0.0, 0.2)
    ]
    softmax, delta = summarise(runs)["rows"]
    assert softmax["ndcg10"] == pytest.approx(0.6)
    assert "change" not in softmax
    assert delta["change"] == pytest.approx([-0.1, -0.1, -0.1])
