"""The loop of one engine's own process: a line of JSON in, the same work timed, a line of JSON out. Standard library alone.

Runs in a peer's environment too. What libraries print goes to standard error, so that the answers stay clean.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TextIO

Ask = dict[str, Any]
Reply = dict[str, Any]


class Contestant(Protocol):
    """One engine, loaded."""

    def describe(self) -> Reply:
        """Return versions, and what it cannot do."""
        ...

    def answer(self, ask: Ask) -> Reply:
        """Do what is asked; the outputs are under `outputs`."""
        ...


def serve(build: Callable[[Any], Contestant]) -> None:
    """Load the engine from the options in the first argument and answer until standard input ends. An error is an answer, too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contestant = build(json.loads(sys.argv[1]))
    _say(answers, contestant.describe())
    for line in sys.stdin:
        _say(answers, _timed(contestant, json.loads(line)))


def _timed(contestant: Contestant, ask: Ask) -> Reply:
    began = time.perf_counter()
    try:
        reply = contestant.answer(ask)
    except Exception as error:  # noqa: BLE001 - what one engine cannot do must not end the comparison
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - began, **reply}


def _say(answers: TextIO, reply: Reply) -> None:
    answers.write(json.dumps(reply) + "\n")
    answers.flush()
