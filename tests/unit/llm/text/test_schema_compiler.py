"""Schemas are compiled once, a few at a time, and callers do not wait beyond their deadline."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from services.errors import DeadlineExceeded, InvalidRequest
from services.llm.text.guided_decoding import JsonGrammar
from services.llm.text.schema_compiler import SchemaCompiler
from tests.support.wait import until


class SlowGuide:
    """Compiles a schema when released; its grammar is the schema. The schema `bad` is invalid."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun: list[str] = []

    def compile(self, schema: str) -> JsonGrammar:
        """Wait until released."""
        self.begun.append(schema)
        self.may_end.wait(10)
        if schema == "bad":
            raise InvalidRequest("response_format", "a problem", "a fix")
        return schema  # type: ignore[return-value] - the compiler does not look into it


@pytest.fixture
def guide() -> Iterator[SlowGuide]:
    """A guide that is released at the end."""
    slow = SlowGuide()
    yield slow
    slow.may_end.set()


def soon() -> float:
    """Return a deadline that passes during the test."""
    return time.monotonic() + 0.05


async def test_a_schema_is_compiled_once(guide: SlowGuide) -> None:
    """Concurrent callers share a compilation, and later callers its result."""
    compiler = SchemaCompiler(guide.compile)
    callers = [asyncio.create_task(compiler.compiled("a", None)) for _ in range(3)]
    await until(lambda: guide.begun == ["a"])
    guide.may_end.set()

    compiled = [*await asyncio.gather(*callers), await compiler.compiled("a", None)]

    assert compiled == ["a"] * 4
    assert guide.begun == ["a"]


async def test_a_compilation_keeps_its_slot_until_it_ends(guide: SlowGuide) -> None:
    """Callers end at their deadline, and further schemas wait for a slot; finished compilations are then reused."""
    compiler = SchemaCompiler(guide.compile, num_slots=2)

    ends = await asyncio.gather(*(compiler.compiled(schema, soon()) for schema in "abcd"), return_exceptions=True)
    await until(lambda: len(guide.begun) == 2)
    begun = set(guide.begun)
    guide.may_end.set()
    later = await asyncio.gather(*(compiler.compiled(schema, None) for schema in "abcd"))

    assert [type(end) for end in ends] == [DeadlineExceeded] * 4
    assert begun == {"a", "b"}
    assert later == list("abcd")
    assert sorted(guide.begun) == list("abcd")


async def test_a_caller_that_leaves_while_it_waits_takes_no_slot(guide: SlowGuide) -> None:
    """If a waiting caller leaves, the callers behind it are served, also for the same schema."""
    compiler = SchemaCompiler(guide.compile, num_slots=1)
    first, leaving, staying = (asyncio.create_task(compiler.compiled(schema, None)) for schema in "abb")
    await until(lambda: guide.begun == ["a"])
    leaving.cancel()
    guide.may_end.set()

    assert await asyncio.gather(first, staying) == ["a", "b"]
    assert guide.begun == ["a", "b"]


async def test_a_problem_is_kept_too(guide: SlowGuide) -> None:
    """A rejected schema is rejected immediately the next time."""
    compiler = SchemaCompiler(guide.compile)
    guide.may_end.set()

    for _ in range(2):
        with pytest.raises(InvalidRequest, match="a problem"):
            await compiler.compiled("bad", None)

    assert guide.begun == ["bad"]


async def test_the_least_recently_used_grammar_is_dropped(guide: SlowGuide) -> None:
    """The number of cached grammars is limited."""
    compiler = SchemaCompiler(guide.compile, num_kept=2)
    guide.may_end.set()

    for schema in "abacab":
        await compiler.compiled(schema, None)

    assert guide.begun == ["a", "b", "c", "b"]


async def test_a_fault_of_the_compiler_is_no_result(guide: SlowGuide) -> None:
    """An internal error is raised, frees the slot and is not cached, so the schema is retried."""

    def fail(_: str) -> JsonGrammar:
        raise RuntimeError("no schema's fault")

    compiler = SchemaCompiler(fail, num_slots=1)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            await compiler.compiled("a", None)
