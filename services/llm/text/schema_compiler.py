"""Compiles the JSON schemas of texts in a few threads in parallel to the engine, each schema once.

    schema ─▶ cached? ─▶ being compiled? wait for it ─▶ a free slot ─▶ thread ─▶ cached

A caller waits until its deadline. Its schema may take longer, and a compilation cannot be stopped: its slot stays taken
until it ends. So schemas never keep more than `num_slots` threads busy, and texts without a schema need no slot. The
result, also a problem, is cached for later requests with the same schema.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from services.errors import DeadlineExceeded, InvalidRequest
from services.llm.text.guided_decoding import JsonGrammar

NUM_SLOTS = 2
NUM_KEPT = 128

_Problem = tuple[str, str, str]
"""Field, problem and fix of an InvalidRequest: cached without the error's traceback, which references compiled
objects."""
_Compiled = JsonGrammar | _Problem


class SchemaCompiler:
    """Compiles with `compile_schema`, which raises InvalidRequest for a bad schema.

    For one event loop.
    """

    def __init__(
        self,
        compile_schema: Callable[[str], JsonGrammar],
        *,
        num_slots: int = NUM_SLOTS,
        num_kept: int = NUM_KEPT,
    ) -> None:
        self._compile = compile_schema
        self._num_kept = num_kept
        self._slots = asyncio.Semaphore(num_slots)
        self._threads = ThreadPoolExecutor(num_slots, "schemas")
        self._kept: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[_Compiled]] = {}

    async def compiled(self, schema: str, until_s: float | None) -> JsonGrammar:
        """Return the schema's grammar.

        Raises InvalidRequest with its problem, DeadlineExceeded if it is not compiled by `until_s` (monotonic).
        """
        digest = hashlib.blake2b(schema.encode(), digest_size=16).digest()
        left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                while digest not in self._kept:
                    await self._step(digest, schema)
        except TimeoutError as error:
            raise DeadlineExceeded("text") from error
        self._kept.move_to_end(digest)
        kept = self._kept[digest]
        if isinstance(kept, tuple):
            raise InvalidRequest(*kept)
        return kept

    async def _step(self, digest: bytes, schema: str) -> None:
        """Wait for a running compilation of the schema; otherwise wait for a slot and start one."""
        if (running := self._running.get(digest)) is not None:
            await asyncio.shield(running)
            return
        await self._slots.acquire()
        if digest in self._kept or digest in self._running:
            self._slots.release()
            return
        loop = asyncio.get_running_loop()
        self._running[digest] = loop.run_in_executor(self._threads, self._outcome_of, schema)
        self._running[digest].add_done_callback(partial(self._ended, digest))

    def _outcome_of(self, schema: str) -> _Compiled:
        try:
            return self._compile(schema)
        except InvalidRequest as error:
            return error.field, error.problem, error.fix

    def _ended(self, digest: bytes, compiled: "asyncio.Future[_Compiled]") -> None:
        del self._running[digest]
        self._slots.release()
        if compiled.cancelled() or compiled.exception() is not None:
            return
        self._kept[digest] = compiled.result()
        if len(self._kept) > self._num_kept:
            self._kept.popitem(last=False)
