"""Passes records of answers to their sinks in batches, a fifth of a second after the answers at most.

In a quiet process the code of a sink has left the CPU's caches, and the first record costs five times as much as the
next. Each sink gets the records in the order of the answers, in the context of their requests.
"""

import asyncio
from collections.abc import Sequence
from contextvars import Context, copy_context

import structlog

from services.gateway.periodic_task import PeriodicTask
from services.gateway.records.answer import AnswerRecord, AnswerSink

log = structlog.get_logger()

BATCH_EVERY_S = 0.2
_MAX_BATCH = 8
"""A batch of this size does not wait: a longer one would delay the requests behind it."""


class AnswerBatches:
    """The waiting records. `every_s` is the time that they wait; 0 passes each record at once."""

    def __init__(self, sinks: Sequence[AnswerSink], every_s: float) -> None:
        self._sinks = sinks
        self._every_s = every_s
        self._waiting: list[tuple[AnswerRecord, Context]] = []
        self._has_waiting = asyncio.Event()
        self._passing = PeriodicTask("records", self._pass_on, every_s, when=self._has_waiting)

    def answered(self, record: AnswerRecord) -> None:
        """Keep a record for the next batch."""
        self._waiting.append((record, copy_context()))
        if not self._every_s:
            self.flush()
        elif len(self._waiting) == _MAX_BATCH:
            asyncio.get_running_loop().call_soon(self.flush)
        else:
            self._has_waiting.set()

    def flush(self) -> None:
        """Pass on the waiting records now."""
        records, self._waiting = self._waiting, []
        for sink in self._sinks:
            for record, context in records:
                try:
                    context.run(sink, record)
                except Exception:
                    log.exception("record_lost", request_id=record.request.request_id)

    async def start(self) -> None:
        self._passing.start()

    async def stop(self) -> None:
        """Stop, and pass on the waiting records."""
        await self._passing.stop()
        self.flush()

    async def _pass_on(self) -> None:
        self.flush()
