"""Sampling of the next token, against an oracle that sorts and draws in plain Python."""

import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from services.errors import InvalidRequest
from services.llm.engine.sampling_parameters import SamplingParams
from services.llm.engine.text import sampling
from services.llm.engine.text.sampling import SamplingInput, cut_tails, sample

VOCAB = 23

settings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.6]),
    presence_penalty=st.sampled_from([-1.5, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 1.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0]), max_size=2),
    seed=st.integers(0, 2**64 - 1),
    num_logprobs=st.sampled_from([None, 0, 3]),
)
draws = st.builds(
    SamplingInput,
    settings,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    num_prompt_tokens=st.integers(0, 4),
)


def changed(logits: list[float], draw: SamplingInput) -> list[float]:
    """Apply penalties and bias token by token."""
    params, generated, out = draw.sampling, draw.tokens[draw.num_prompt_tokens :], list(logits)
    for token in range(VOCAB):
        if token in draw.tokens:
            out[token] = (
                out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
            )
        out[token] -= params.frequency_penalty * generated.count(token)
        out[token] -= params.presence_penalty * (token in generated)
        out[token] += params.logit_bias.get(token, 0.0)
    return out


def sorted_cut(scores: list[float], params: SamplingParams) -> set[int]:
    """Return the tokens kept by min-p, top-k and top-p, by sorting; probabilities are summed in units of 2^-52."""
    mass = torch.tensor(scores, dtype=torch.float64).softmax(-1).tolist()
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    kept = [token for token in order if mass[token] >= params.min_p * max(mass)][: params.top_k or None]
    units = {token: int(mass[token] * 2**52) for token in kept}
    if params.top_p == 1:
        return set(kept)
    target = max(1, math.ceil(params.top_p * sum(units.values())))
    before = [0, *accumulate(units.values())]
    return {token for token, sum_before in zip(kept, before, strict=False) if sum_before < target}


@hypothesis_settings(max_examples=20)
@given(st.lists(draws, min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_every_choice_is_one_of_the_oracle(params: list[SamplingInput], seed: int) -> None:
    """Greedy takes the best changed logit; a draw takes the kept token that the uniform number selects."""
    logits_RV = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (len(params), VOCAB)))

    chosen = sample(logits_RV, params).tokens()

    for row, draw, choice in zip(logits_RV.tolist(), params, chosen, strict=True):
        logits = changed(row, draw)
        if draw.sampling.temperature == 0:
            assert logits[choice.token_id] == pytest.approx(max(logits))
            continue
        scaled = [logit / draw.sampling.temperature for logit in logits]
        weights = {token: math.exp(scaled[token] - max(scaled)) for token in sorted_cut(scaled, draw.sampling)}
        uniform = np.random.Generator(np.random.Philox(key=draw.sampling.seed, counter=len(draw.tokens))).random()
        target = uniform * sum(weights.values())
        below = sum(weight for token, weight in weights.items() if token < choice.token_id)
        assert choice.token_id in weights
        assert below - 1e-4 <= target <= below + weights[choice.token_id] + 1e-4


@hypothesis_settings(max_examples=40)
@given(
    st.lists(settings, min_size=1, max_size=4),
    st.integers(1, 3_000),
    st.sampled_from([0.0, 0.01, 3.0, 1e4]),
    st.sampled_from([None, 0, 2]),
    st.integers(0, 2**32 - 1),
)
def test_the_cut_keeps_the_very_tokens_that_sorting_keeps(params, size, spread, decimals, seed) -> None:
    """The cut keeps the same tokens as sorting for any settings, ties, zeros of both signs, and forbidden tokens."""
    draw = np.random.default_rng(seed)
    scores = draw.normal(0, spread, (len(params), size)).astype(np.float32)
    if decimals is not None:
        scores = scores.round(decimals)
    scores[draw.random(scores.shape) < 0.2] = -np.inf
    scores[:, draw.integers(size)] = -0.0

    kept = cut_tails(torch.from_numpy(scores), params)

    for row, scored, param in zip(kept.tolist(), scores.tolist(), params, strict=True):
        wanted = sorted_cut(scored, param)
        assert row == [score if token in wanted else -math.inf for token, score in enumerate(scored)]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_the_models_own(temperature: float) -> None:
    """Logprobs precede penalties, bias and temperature; the most probable tokens come best first."""
    logits_RV = torch.randn(1, VOCAB, dtype=torch.float64)
    params = SamplingParams(temperature=temperature, num_logprobs=4, logit_bias={2: 50.0}, seed=1)

    (choice,) = sample(logits_RV, [SamplingInput(params, [5], 1)]).tokens()

    logprob_V = logits_RV[0].log_softmax(-1)
    assert choice.token_id == 2
    assert choice.logprob == pytest.approx(float(logprob_V[2]))
    assert [token for token, _ in choice.top] == logprob_V.argsort(descending=True)[:4].tolist()
    assert [logprob for _, logprob in choice.top] == pytest.approx(logprob_V.sort(descending=True).values[:4].tolist())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"temperature": 1e39},
        {"repetition_penalty": 1e39},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {1: math.nan}},
        {"num_logprobs": 21},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    """The error names the field and a valid value."""
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**wrong)

    assert refused.value.field == next(iter(wrong))
    assert refused.value.fix.startswith("send ")


def test_a_draw_at_the_end_is_a_possible_token(monkeypatch) -> None:
    """A uniform number that rounds up to one draws the last token with a probability above zero."""
    monkeypatch.setattr(sampling, "_uniform", lambda draw: 1 - 2**-30)
    logits_RV = torch.tensor([[0.0, 2.0, 1.0, -torch.inf, -torch.inf]])

    (choice,) = sample(logits_RV, [SamplingInput(SamplingParams(temperature=1.0), [0], 1)]).tokens()

    assert choice.token_id == 2


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1e30},
        {"repetition_penalty": 1e30, "frequency_penalty": -2.0, "temperature": 1e-30},
        {"logit_bias": {3: 1e30, 4: 1e30}, "temperature": 1e-7},
        {"logit_bias": dict.fromkeys(range(VOCAB), -1e30)},
        {"top_p": 5e-324, "top_k": 3},
        {"top_p": 5e-324, "min_p": 1.0},
        {"temperature": 1e30},
        {"temperature": 5e-324},
    ],
)
def test_extreme_settings_choose_a_token_of_the_vocabulary(extreme: dict[str, Any]) -> None:
    """At the limits of the settings, an allowed token of the vocabulary is drawn."""
    logits_RV = torch.randn(8, VOCAB)
    allowed = np.array([0b11100], dtype=np.int32)
    params = [SamplingParams(**{"temperature": 1.0, "seed": seed, **extreme}) for seed in range(8)]

    free = sample(logits_RV, [SamplingInput(param, [3, 4], 1) for param in params]).tokens()
    masked = sample(logits_RV, [SamplingInput(param, [3, 4], 1, allowed) for param in params]).tokens()

    assert all(0 <= choice.token_id < VOCAB for choice in free)
    assert all(2 <= choice.token_id <= 4 for choice in masked)


def test_logits_that_are_not_numbers_affect_their_own_row_alone() -> None:
    """A row of NaN or infinite logits still gives a vocabulary token, and other rows are unchanged."""
    logits_RV = torch.randn(3, VOCAB)
    draws = [SamplingInput(SamplingParams(temperature=1.0, top_p=0.9, seed=seed), [1], 1) for seed in range(3)]
    wanted = sample(logits_RV[1:2], draws[1:2]).tokens()

    logits_RV[0], logits_RV[2] = torch.nan, torch.inf
    chosen = sample(logits_RV, draws).tokens()

    assert chosen[1:2] == wanted
    assert all(0 <= choice.token_id < VOCAB for choice in chosen)


def test_equally_probable_tokens_are_ordered_by_id() -> None:
    """Ties, common in bf16, are ordered by id, so the greedy token is the first."""
    logits_RV = torch.zeros(2, 1_000)
    logits_RV[1, 500:] = 3.0

    choices = sample(logits_RV, [SamplingInput(SamplingParams(num_logprobs=3), [0], 1)] * 2).tokens()

    assert [choice.token_id for choice in choices] == [0, 500]
    assert [[token for token, _ in choice.top] for choice in choices] == [[0, 1, 2], [500, 501, 502]]
