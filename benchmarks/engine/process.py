"""One engine's process as the comparison sees it: started, asked, ended. Knows nothing of what is asked."""

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LOAD_S = 900.0
_ANSWER_S = 900.0
_TOLD_LINES = 30


class EngineFailed(Exception):
    """The process ended, hung, or could not do what was asked."""


class EngineProcess:
    """A process that runs one of the engine modules. `python` is its environment's interpreter, `variables` its environment variables."""

    def __init__(self, python: Path, module: str, options: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        settings = [f"{name}={value}" for name, value in variables.items()]
        self._process = subprocess.Popen(
            ["/usr/bin/env", *settings, python, "-m", module, json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self.described: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Wait for the engine to be loaded. Raises EngineFailed."""
        self.described = self._read(_LOAD_S)

    def ask(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """Ask and wait. Raises EngineFailed, the end of the process's log printed."""
        assert self._process.stdin is not None, "opened with a pipe"
        try:
            self._process.stdin.write(json.dumps(ask).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineFailed(self._last_words()) from error
        reply = self._read(_ANSWER_S)
        if "error" in reply:
            print(self._log_end(), file=sys.stderr)
            raise EngineFailed(reply["error"])
        return reply

    def stop(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened with a pipe"
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise EngineFailed(f"no answer in {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _last_words(self) -> str:
        self._process.wait()
        return self._log_end() or f"ended with {self._process.returncode}"

    def _log_end(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-_TOLD_LINES:])
