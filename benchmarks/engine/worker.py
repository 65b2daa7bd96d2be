"""The loop of an engine process: one line of JSON in, timed work, one line of JSON out. Standard library only.

Also runs in a peer's environment. Library output goes to standard error, so that replies stay clean.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TextIO

Request = dict[str, Any]
Reply = dict[str, Any]


class BenchmarkEngine(Protocol):
    """One engine, loaded."""

    def describe(self) -> Reply:
        """Return versions and limitations."""
        ...

    def answer(self, ask: Request) -> Reply:
        """Handle one request; the outputs are under `outputs`."""
        ...


def serve(build: Callable[[Any], BenchmarkEngine]) -> None:
    """Load the engine with the options in the first argument and reply until input ends. Errors are replies, too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = build(json.loads(sys.argv[1]))
    _say(answers, engine.describe())
    for line in sys.stdin:
        _say(answers, _timed(engine, json.loads(line)))


def _timed(engine: BenchmarkEngine, ask: Request) -> Reply:
    began = time.perf_counter()
    try:
        reply = engine.answer(ask)
    except Exception as error:  # noqa: BLE001 - one engine's failure must not end the comparison
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - began, **reply}


def _say(answers: TextIO, reply: Reply) -> None:
    answers.write(json.dumps(reply) + "\n")
    answers.flush()
