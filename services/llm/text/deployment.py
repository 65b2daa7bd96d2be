"""Text as a Ray Serve deployment: a request in, a stream of batches of events out, with an engine for one checkpoint.

`model` interprets requests; order and admission belong to the engine. Refusals are sent as values. A batch is sent as
soon as there are events, but all streams together send at most one message per millisecond: the cost of a message (Ray
pickles it, and wakes two processes) would otherwise slow the engine.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import structlog
import torch
from prometheus_client import CollectorRegistry

from services.contracts.text import TextModel, TextRequest
from services.errors import TailraceError
from services.garbage import freeze_start
from services.llm.engine.config import EngineConfig
from services.llm.ranking.deployment import engine_config
from services.llm.serving.card import KvPoolSize, check_support, limits_of, open_card
from services.llm.serving.engine_thread import EngineThread
from services.llm.serving.metrics import EngineStepMetrics
from services.llm.serving.reply import Refusal, refusal_of
from services.llm.text.checkpoint import checkpoint_folder
from services.llm.text.generate import Events, generate
from services.llm.text.model import LoadedText, RequestLimits, load_text
from services.observability.log_lines import configure_logging
from services.observability.metrics import EngineMetrics, ProcessMetrics
from services.observability.tracing import note, note_failure, open_tracing
from services.settings.settings import Settings

log = structlog.get_logger()

_CPU_BLOCKS = 2_048
_CPU_DRAFTS = 7
_MESSAGE_S = 0.001


class TextDeployment:
    """One replica."""

    _is_running = False
    """Set from the end of the start to the stop: the collector calls `__del__` again after Ray Serve."""

    def __init__(self, settings: Settings) -> None:
        configure_logging(settings.log_level, "text", settings.log_file)
        torch.set_num_threads(settings.text_threads)
        self._tracing = open_tracing(settings.otlp_endpoint, settings.trace_share, "tailrace-text")
        self._max_step_s = settings.engine_max_step_s
        self._num_open = 0
        registry = CollectorRegistry()
        metrics = EngineMetrics(registry)
        ProcessMetrics(registry, "text")
        pool = text_pool(settings)
        limits = limits_of(pool.card, settings.llm_device, settings.text_dtype)
        self._text = _load(settings, pool)
        name = self._text.model.name
        report = EngineStepMetrics(metrics, self._text.engine, name, limits)
        self._thread = EngineThread(self._text.engine, settings.text_threads, report.record)
        freeze_start()
        self._is_running = True

    def __del__(self) -> None:
        """Stop the replica; requests in flight may finish. Called by Ray Serve."""
        if self._is_running:
            self._is_running = False
            log.info("stopping")
            self._thread.stop()
            self._tracing.stop()

    async def models(self) -> tuple[TextModel, ...]:
        return (self._text.model,)

    async def write(self, request: TextRequest, budget_s: float) -> AsyncGenerator[Events | Refusal, None]:
        """Yield batches of events, within `budget_s` from now; a refusal is the last item.

        Closing the stream cancels the request in the engine.
        """
        until_s = time.monotonic() + budget_s
        with self._tracing.continuation("text.write", request.trace):
            note({"tailrace.request_id": request.request_id})
            self._num_open += 1
            try:
                async with aclosing(self._write(request, until_s)) as batches:
                    async for events in batches:
                        yield events
            except TailraceError as error:
                note_failure(type(error).__name__, is_ours=True)
                yield refusal_of(error)
            finally:
                self._num_open -= 1

    async def _write(self, request: TextRequest, until_s: float) -> AsyncGenerator[Events, None]:
        plan = await self._text.plan(request, until_s)
        next_s = 0.0
        async with aclosing(generate(plan, self._thread, in_pieces=request.in_pieces)) as batches:
            async for events in batches:
                yield events
                next_s = max(next_s, time.monotonic()) + _MESSAGE_S * self._num_open
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    def check_health(self) -> None:
        """Raise when the engine hangs or has died. Ray Serve's health check."""
        self._thread.check_health(self._max_step_s)


def text_engine_config(settings: Settings) -> EngineConfig:
    """Return the text engine's configuration: the ranking engine's with other blocks and weights, and with drafts."""
    num_drafts = settings.text_num_speculative_tokens
    if num_drafts is None:
        num_drafts = _CPU_DRAFTS if settings.llm_device == "cpu" else 0
    return replace(
        engine_config(settings),
        num_blocks=settings.text_kv_num_blocks or _CPU_BLOCKS,
        weight_kind=settings.text_weight_kind,
        num_speculative_tokens=num_drafts,
        tensor_parallel_size=settings.text_tensor_parallel_size,
    )


def text_pool(settings: Settings) -> KvPoolSize:
    """Return the size of the text engine's KV pool. Raises ConfigError if the device does not support the settings."""
    card = open_card(settings.llm_device)
    check_support(card, "TAILRACE_TEXT_DTYPE", settings.text_dtype, settings.kv_kind)
    return KvPoolSize(card, "TAILRACE_TEXT_KV_NUM_BLOCKS", settings.text_kv_num_blocks, settings.kv_memory_share)


def _load(settings: Settings, pool: KvPoolSize) -> LoadedText:
    folder = checkpoint_folder(settings.text_path, settings.cache_dir)
    dtype: torch.dtype = getattr(torch, settings.text_dtype)
    limits = RequestLimits(max_tokens=settings.text_max_tokens, max_choices=settings.text_max_choices)
    name, config = settings.text_model or folder.name, text_engine_config(settings)
    return load_text(folder, name, config, dtype, settings.llm_device, limits, pool)
