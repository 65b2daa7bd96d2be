"""Become a worker process of Ray: Ray's node server starts this program in place of Ray's `setup_worker.py`.

Ray's program imports Ray, sets variables, and starts Python again, which imports Ray a second time: 0.4 s of processor
time a worker. This program sets the same variables in the process that becomes the worker, and lets its imports collect
garbage rarely, until the actor has started. Standard library only. The two programs were read in ray 2.60.0.
"""

import argparse
import gc
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

START_THRESHOLD = 50_000
"""Objects between two collections of a starting process, whose imports make objects that stay."""


def main() -> None:
    """Set the variables of the worker's runtime environment, then run Ray's program with the remaining arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serialized-runtime-env-context", type=json.loads, default={})
    parser.add_argument("--language", choices=["PYTHON"])
    options, (program, *arguments) = parser.parse_known_args()
    variables = variables_of(options.serialized_runtime_env_context)
    os.environ.update(variables)  # noqa: TID251 - Ray's program reads them
    gc.set_threshold(START_THRESHOLD)
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def variables_of(context: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a runtime environment. Raises ValueError for one that has more than variables."""
    others = {name for name, value in context.items() if value and name not in {"env_vars", "py_executable"}}
    if others or context.get("py_executable", sys.executable) != sys.executable:
        raise ValueError(f"runtime environment: only variables are supported; remove {', '.join(others) or 'python'}")
    return dict(context.get("env_vars") or {})


if __name__ == "__main__":
    main()
