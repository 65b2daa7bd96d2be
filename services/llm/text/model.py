"""A loaded text checkpoint: its decoder in an engine, its tokenizer and chat template, and the planning of requests.

It converts between text (outside) and tokens, seeds and masks (inside), and warms the engine up. It does not know Ray
or the source of checkpoints.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from services.contracts.text import TextModel, TextRequest
from services.errors import CheckpointError, ContextTooLong, InvalidRequest, NotFound, Overloaded
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import EngineOutcome
from services.llm.engine.ranks import load_part, start_ranks
from services.llm.engine.sampling_parameters import GREEDY, SamplingParams
from services.llm.serving.card import KvPoolSize, pool_of
from services.llm.text.chat_template import (
    ChatTemplate,
    load_chat_template,
    read_eos_ids,
)
from services.llm.text.generate import TextChoice, TextPlan
from services.llm.text.guided_decoding import JsonGuide, JsonMask
from services.llm.text.schema_compiler import SchemaCompiler
from services.llm.text.tokenizer import TextTokenizer, load_tokenizer

_MAX_SEED = 2**64 - 1
_WARM_UP_TOKENS = 8
_WITH_LOGPROBS = SamplingParams(num_logprobs=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one request."""

    max_tokens: int
    max_choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedText:
    """A loaded checkpoint. Its engine is owned by the thread that runs it."""

    model: TextModel
    engine: Engine
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    schemas: SchemaCompiler
    eos_ids: frozenset[int]
    limits: RequestLimits

    async def plan(self, request: TextRequest, deadline_s: float | None) -> TextPlan:
        """Return the plan of a request; `deadline_s` is on the engine's clock.

        Raises NotFound, InvalidRequest naming the field, or DeadlineExceeded if its schema takes longer.
        """
        self._check(request)
        prompt = await asyncio.to_thread(self.prompt_of, request)
        max_tokens = self._max_tokens(request, len(prompt))
        masks: Sequence[JsonMask] = ()
        if request.json_schema is not None:
            masks = (await self.schemas.compiled(request.json_schema, deadline_s)).masks(request.n)
        ends_by_eos = bool(masks) or not request.ignore_eos
        stop_ids = frozenset(request.stop_token_ids) | (self.eos_ids if ends_by_eos else frozenset())
        options = asdict(request.sampling)
        seeds = _seeds(request.sampling.seed, request.n)
        sampling = [SamplingParams(**{**options, "seed": seed}) for seed in seeds]

        def add(engine: Engine, request_ids: Sequence[str], now_s: float) -> None:
            for index, request_id in enumerate(request_ids):
                engine.add_text(
                    request_id,
                    prompt,
                    max_new_tokens=max_tokens,
                    sampling=sampling[index],
                    stop_token_ids=stop_ids,
                    mask=masks[index] if masks else None,
                    after=request_ids[0] if index else None,
                    cache_scope=request.cache_scope,
                    tenant=request.tenant,
                    weight=request.weight,
                    priority=request.priority,
                    now_s=now_s,
                    deadline_s=deadline_s,
                )

        choices = [
            TextChoice(index, self.tokenizer, stop=request.stop, stop_token_ids=stop_ids) for index in range(request.n)
        ]
        return TextPlan(add=add, choices=tuple(choices), masks=tuple(masks), num_prompt_tokens=len(prompt))

    def prompt_of(self, request: TextRequest) -> Sequence[int]:
        """Return the tokens of the prompt: as given, of the text, or of the messages rendered by the chat template."""
        if request.messages:
            if self.template is None:
                raise InvalidRequest("messages", "this model has no chat template", "send a prompt to completions")
            rendered = self.template.render(request.messages, request.chat_template_kwargs)
            return self.tokenizer.encode(rendered, with_special_tokens=False)
        if isinstance(request.prompt, str):
            return self.tokenizer.encode(request.prompt, with_special_tokens=True)
        if request.prompt is None:
            raise InvalidRequest("prompt", "missing", "send a prompt or messages")
        return request.prompt

    def _check(self, request: TextRequest) -> None:
        if request.model not in ("", self.model.name):
            raise NotFound(f"model {request.model!r} is not served here", f"send {self.model.name!r}")
        if not 1 <= request.n <= self.limits.max_choices:
            raise InvalidRequest("n", f"{request.n} is out of range", f"send 1 to {self.limits.max_choices}")

    def _max_tokens(self, request: TextRequest, num_prompt_tokens: int) -> int:
        longest = self.engine.max_tokens
        room = longest - num_prompt_tokens
        if room < 1:
            field = "messages" if request.messages else "prompt"
            raise _too_long(field, f"{num_prompt_tokens} tokens long", longest, longest - 1)
        most = min(room, self.limits.max_tokens)
        if request.max_tokens is None:
            return most
        field = "max_completion_tokens" if "max_completion_tokens" in request.settings_sent else "max_tokens"
        if request.max_tokens > room:
            raise _too_long(field, f"{request.max_tokens} after {num_prompt_tokens} of prompt", longest, most)
        if not 1 <= request.max_tokens <= most:
            raise InvalidRequest(field, f"{request.max_tokens} is out of range", f"send 1 to {most}")
        return request.max_tokens


def load_text(
    folder: Path,
    name: str,
    config: EngineConfig,
    dtype: torch.dtype,
    device: str,
    limits: RequestLimits,
    pool: KvPoolSize | None = None,
) -> LoadedText:
    """Load a checkpoint folder and warm its engine up.

    Raises CheckpointError naming the missing or unsupported part, ConfigError if the KV pool does not fit.
    """
    decoder, config = load_part(folder, dtype, device, config)
    config = pool_of(decoder, config, pool)
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder)
    eos_ids = read_eos_ids(folder, tokenizer, template)
    ranks = start_ranks(folder, dtype, device, config, items=None)
    engine = Engine(decoder, config, items=None, bundle_version=name, ranks=ranks)
    model = TextModel(
        name=name,
        max_context_tokens=engine.max_tokens,
        created_unix_s=int((folder / "config.json").stat().st_mtime),
        has_chat_template=template is not None,
        template_variables=template.variables if template else frozenset(),
    )
    try:
        guide = JsonGuide(tokenizer, decoder.config.vocab_size, eos_ids)
    except ValueError as error:
        raise CheckpointError(f"{folder}: config, tokenizer and eos_token_id do not fit together ({error})") from error
    try:
        _warm_up(engine)
    except CheckpointError as error:
        engine.close()
        raise CheckpointError(f"{folder}: {error}") from error
    return LoadedText(
        model=model,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        schemas=SchemaCompiler(guide.compile),
        eos_ids=eos_ids,
        limits=limits,
    )


def _too_long(field: str, problem: str, longest: int, most: int) -> ContextTooLong:
    """Return the error for a prompt that is too long, worded as clients of OpenAI and vLLM expect it."""
    return ContextTooLong(
        field, problem, f"this model's maximum context length is {longest} tokens, so send at most {most}"
    )


def _seeds(seed: int | None, count: int) -> list[int]:
    """Return a seed for each choice. The first is the request's, so that n=1 returns the first of n choices."""
    first = secrets.randbits(63) if seed is None else seed % (_MAX_SEED + 1)
    return [(first + index) % (_MAX_SEED + 1) for index in range(count)]


def _warm_up(engine: Engine) -> None:
    """Capture graphs, then run every kind of step once.

    These are short and long prompts, single and batched, and their decode steps.
    """
    engine.warm_up()
    lengths = [min(length, engine.max_tokens - _WARM_UP_TOKENS) for length in (1, 3, 200)]
    for batch in (lengths[:1], lengths):
        for index, length in enumerate(batch):
            with suppress(Overloaded):  # the queue may be shorter
                prompt, sampling = [0] * max(length, 1), GREEDY if index else _WITH_LOGPROBS
                engine.add_text(f"warm-up {index}", prompt, max_new_tokens=_WARM_UP_TOKENS, sampling=sampling)
        while engine.has_work:
            began_s = time.monotonic()
            outcomes = engine.step(0.0)
            engine.record_step_time(time.monotonic() - began_s)
            _check_logprobs(outcomes)


def _check_logprobs(outcomes: Sequence[EngineOutcome]) -> None:
    """Reject a model whose logits are NaN. Raises CheckpointError."""
    for outcome in outcomes:
        if not all(math.isfinite(token.logprob or 0.0) for token in outcome.tokens):
            raise CheckpointError("the model computes logits that are not finite; its weights overflow in this dtype")
