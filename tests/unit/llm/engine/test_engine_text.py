"""Text decode: equality with transformers, independence of the batch, refusals, windows."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.decoder.weights import load_decoder
from models.decoder.window import Window
from services.errors import InvalidRequest
from services.llm.engine.outcome import Status
from services.llm.engine.text.parameters import SamplingParams
from tests.unit.llm.engine.conftest import build_decoder, build_engine, build_items, drain


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama of transformers and our decoder with the same weights."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, load_decoder(folder, torch.float32, "cpu")


def prompts_of(count: int) -> list[list[int]]:
    """Build prompts of random lengths."""
    rng = np.random.default_rng(6)
    return [[0, *rng.integers(2, 120, rng.integers(1, 40)).tolist()] for _ in range(count)]


def test_greedy_equals_transformers(llama) -> None:
    """Greedy decode of a batch equals transformers' generate token for token, the stop token included."""
    model, decoder = llama
    engine = build_engine(decoder, None)
    prompts = prompts_of(6)

    for index, prompt in enumerate(prompts):
        engine.add_text(str(index), prompt, max_new_tokens=30, stop_token_ids=[1])
    outcomes = drain(engine)

    for index, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        wanted = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=30, do_sample=False)
        assert list(outcomes[str(index)].token_ids) == wanted[0, len(prompt) :].tolist()
        stopped = outcomes[str(index)].token_ids[-1] == 1
        assert outcomes[str(index)].status == (Status.DONE if stopped else Status.LENGTH)


@pytest.fixture(scope="module")
def requests(llama) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """Requests with the tokens that an engine generates which runs each alone: greedy, drawn, and drawn with every setting."""
    pairs = []
    for index, prompt in enumerate(prompts_of(9)):
        samplings = (
            {},
            {"temperature": 0.7},
            {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5, "num_logprobs": 2},
        )
        sampling = SamplingParams(seed=index, **samplings[index % 3])
        request = {"prompt_token_ids": prompt, "max_new_tokens": 15, "sampling": sampling}
        alone = build_engine(llama[1], None)
        alone.add_text("x", **request)
        pairs.append((request, drain(alone)["x"].token_ids))
    return pairs


@pytest.mark.parametrize("knobs", [{"num_blocks": 24}, {"max_num_batched_tokens": 5, "max_running": 3}])
def test_batched_equals_alone(llama, requests, knobs) -> None:
    """A request has the same tokens in a batch as alone, sampled or greedy, preemption included."""
    engine = build_engine(llama[1], None, **knobs)
    for index, (request, _) in enumerate(requests):
        engine.add_text(str(index), **request)

    outcomes = drain(engine)

    assert [outcomes[str(index)].token_ids for index in range(len(requests))] == [alone for _, alone in requests]


def test_a_conversation_goes_on_from_its_cache(llama) -> None:
    """Generated tokens are cached like prompts, so that the next turn prefills only its own."""
    _, decoder = llama
    engine = build_engine(decoder, None)
    engine.add_text("one", list(range(2, 12)), max_new_tokens=11)
    turn = [*range(2, 12), *drain(engine)["one"].token_ids]

    engine.add_text("two", [*turn, 7], max_new_tokens=1)

    assert drain(engine)["two"].num_cached_tokens == 20


@pytest.mark.parametrize(
    ("num_prompt", "fields", "refusal"),
    [
        (41, {}, "prompt: 41 tokens long; send 1 to 39"),
        (40, {}, "prompt: 40 tokens long; send 1 to 39"),
        (39, {"max_new_tokens": 2}, "max_new_tokens: 2 after a prompt of 39; send at most 1"),
        (3, {"max_new_tokens": 500}, "max_new_tokens: 500 after a prompt of 3; send at most 37"),
        (1, {"max_new_tokens": 0}, "max_new_tokens: "),
        (1, {"sampling": SamplingParams(logit_bias={120: 1.0})}, "logit_bias"),
    ],
)
def test_an_impossible_request_is_refused_by_field(llama, num_prompt, fields, refusal) -> None:
    """The prompt where it leaves no room for a token, else the field out of range; the proposed values are accepted."""
    engine = build_engine(llama[1], None, num_blocks=10)

    with pytest.raises(InvalidRequest) as refused:
        engine.add_text("a", [5] * num_prompt, **{"max_new_tokens": 1, **fields})

    assert str(refused.value).startswith(refusal)
    engine.add_text("a", [5] * 39, max_new_tokens=1)
    engine.add_text("b", [5] * 3, max_new_tokens=37)


def test_a_text_longer_than_the_pool_is_written_under_a_window() -> None:
    """Where every layer has a window, the blocks behind it are freed: a pool of 24 tokens generates the 60 of a large pool.

    With one layer without a window such a text is refused.
    """
    decoder = build_decoder(build_items(1), window=Window(8, frozenset({0, 1}), num_sinks=2))
    texts = []

    for num_blocks in (6, 256):
        engine = build_engine(decoder, None, num_blocks=num_blocks, max_chunk_tokens=8)
        engine.add_text("long", [1, 2, 3] * 12, max_new_tokens=60)
        texts.append(drain(engine)["long"].token_ids)

    assert len(texts[0]) == 60
    assert texts[0] == texts[1]
    full = build_engine(build_decoder(build_items(1), window=Window(8, frozenset({0}))), None, num_blocks=6)
    with pytest.raises(InvalidRequest, match="max_new_tokens: 200 after a prompt of 3; send at most 21"):
        full.add_text("long", [1, 2, 3], max_new_tokens=200)
    assert full.max_tokens == 24
