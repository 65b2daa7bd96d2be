"""Text decode: transformers' own greedy tokens, batches that change nothing, seeded draws."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.decoder.weights import load_decoder
from models.decoder.window import Window
from services.errors import InvalidRequest
from services.llm.engine.outcome import Status
from services.llm.engine.text.parameters import SamplingParams


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


def settings_of(index: int) -> SamplingParams:
    """Greedy, drawn, and drawn with every setting at once."""
    return (
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=index),
        SamplingParams(
            temperature=1.4, seed=index, top_k=40, top_p=0.9, min_p=0.01, presence_penalty=0.5, num_logprobs=2
        ),
    )[index % 3]


def prompts_of(count: int) -> list[list[int]]:
    """Build prompts of random lengths."""
    rng = np.random.default_rng(6)
    return [[0, *rng.integers(2, 120, rng.integers(1, 40)).tolist()] for _ in range(count)]


def test_greedy_equals_transformers(llama, engine_of, drained) -> None:
    """Greedy decode of a batch gives transformers' generate token for token, the stop token included."""
    model, decoder = llama
    engine = engine_of(decoder, None)
    prompts = prompts_of(12)

    for index, prompt in enumerate(prompts):
        engine.add_text(str(index), prompt, max_new_tokens=30, stop_token_ids=[1])
    outcomes = drained(engine)

    for index, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        wanted = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=30, do_sample=False)
        assert list(outcomes[str(index)].token_ids) == wanted[0, len(prompt) :].tolist()
        stopped = outcomes[str(index)].token_ids[-1] == 1
        assert outcomes[str(index)].status == (Status.DONE if stopped else Status.LENGTH)


@pytest.mark.parametrize("knobs", [{}, {"num_blocks": 24}, {"max_num_batched_tokens": 5}, {"max_running": 3}])
def test_batched_equals_alone(llama, knobs, engine_of, drained) -> None:
    """Token for token, sampled or greedy, a request gives the same in a crowd as alone, preemption included."""
    _, decoder = llama
    asks = [
        {"prompt_token_ids": prompt, "max_new_tokens": 20, "sampling": settings_of(index)}
        for index, prompt in enumerate(prompts_of(10))
    ]

    crowd = engine_of(decoder, None, **knobs)
    for index, ask in enumerate(asks):
        crowd.add_text(str(index), **ask)
    together = drained(crowd)

    for index, ask in enumerate(asks):
        alone = engine_of(decoder, None)
        alone.add_text("x", **ask)
        assert together[str(index)].token_ids == drained(alone)["x"].token_ids


def test_the_seed_decides_the_draw(llama, engine_of, drained) -> None:
    """The same seed draws the same tokens again, another seed others."""
    _, decoder = llama
    engine = engine_of(decoder, None)
    for name, seed in (("a", 1), ("again", 1), ("other", 2)):
        engine.add_text(name, [0, 5, 9], max_new_tokens=20, sampling=SamplingParams(temperature=1.5, seed=seed))

    outcomes = drained(engine)

    assert outcomes["a"].token_ids == outcomes["again"].token_ids
    assert outcomes["a"].token_ids != outcomes["other"].token_ids


def test_draws_follow_the_distribution(llama, engine_of, drained) -> None:
    """Over many seeds the first token's frequencies are the model's probabilities."""
    model, decoder = llama
    engine = engine_of(decoder, None, max_waiting=3000, max_running=64)
    for seed in range(2000):
        engine.add_text(str(seed), [0, 5, 9], max_new_tokens=1, sampling=SamplingParams(temperature=2.0, seed=seed))

    drawn = np.bincount([outcome.token_ids[0] for outcome in drained(engine).values()], minlength=120) / 2000

    with torch.inference_mode():
        wanted = (model(torch.tensor([[0, 5, 9]])).logits[0, -1] / 2.0).softmax(-1).numpy()
    assert np.abs(drawn - wanted).sum() < 0.25


def test_a_conversation_goes_on_from_its_cache(llama, engine_of, drained) -> None:
    """Generated tokens are cached like prompts, so the next turn prefills only what is new."""
    _, decoder = llama
    engine = engine_of(decoder, None)
    engine.add_text("one", list(range(2, 12)), max_new_tokens=11)
    turn = [*range(2, 12), *drained(engine)["one"].token_ids]

    engine.add_text("two", [*turn, 7], max_new_tokens=1)

    assert drained(engine)["two"].num_cached_tokens == 20


@pytest.mark.parametrize(
    ("change", "field"),
    [({"max_new_tokens": 0}, "max_new_tokens"), ({"sampling": SamplingParams(logit_bias={120: 1.0})}, "logit_bias")],
)
def test_bad_settings_are_refused_by_field(llama, change, field, engine_of) -> None:
    """A setting out of range is refused, naming it."""
    engine = engine_of(llama[1], None)

    with pytest.raises(InvalidRequest) as refused:
        engine.add_text("a", [0], **{"max_new_tokens": 3, **change})

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("num_prompt", "max_new_tokens", "refusal"),
    [
        (41, 1, "prompt: 41 tokens long; send 1 to 39"),
        (40, 1, "prompt: 40 tokens long; send 1 to 39"),
        (39, 2, "max_new_tokens: 2 after a prompt of 39; send at most 1"),
        (3, 500, "max_new_tokens: 500 after a prompt of 3; send at most 37"),
    ],
)
def test_what_is_longer_than_the_pool_is_refused_by_field(
    llama, num_prompt, max_new_tokens, refusal, engine_of
) -> None:
    """The prompt where it leaves no room for a token, else how many more are asked for; what is told to be right is taken."""
    engine = engine_of(llama[1], None, num_blocks=10)

    with pytest.raises(InvalidRequest) as refused:
        engine.add_text("a", [5] * num_prompt, max_new_tokens=max_new_tokens)

    assert str(refused.value) == refusal
    engine.add_text("a", [5] * 39, max_new_tokens=1)
    engine.add_text("b", [5] * 3, max_new_tokens=37)


def test_a_text_longer_than_the_pool_is_written_under_a_window(items_of, decoder_of, engine_of, drained) -> None:
    """Blocks behind a window that every layer has are free again: in 6 blocks of 4 a text of 200 tokens is that of a large pool."""
    decoder = decoder_of(items_of(1), window=Window(8, frozenset({0, 1}), num_sinks=2))
    texts = []

    for num_blocks in (6, 256):
        engine = engine_of(decoder, None, num_blocks=num_blocks, max_chunk_tokens=8)
        engine.add_text("long", [1, 2, 3] * 12, max_new_tokens=200)
        texts.append(drained(engine)["long"].token_ids)

    assert len(texts[0]) == 200
    assert texts[0] == texts[1]


def test_a_layer_that_sees_everything_keeps_every_block(items_of, decoder_of, engine_of) -> None:
    """Where one layer has no window, a text longer than the pool is refused."""
    engine = engine_of(decoder_of(items_of(1), window=Window(8, frozenset({0}))), None, num_blocks=6)

    with pytest.raises(InvalidRequest, match="max_new_tokens: 200 after a prompt of 3; send at most 21"):
        engine.add_text("long", [1, 2, 3], max_new_tokens=200)

    assert engine.max_tokens == 24
