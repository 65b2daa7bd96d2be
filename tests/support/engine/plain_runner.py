"""Run a test file without pytest: functions, their parametrizations, and fixtures without arguments. Standard library
only.

`python -m tests.support.engine.plain_runner tests/gpu/test_engine_on_gpu.py`. Replaces the parts of pytest that these
files use, and exits with 1 if a test fails.
"""

import importlib.util
import inspect
import itertools
import math
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any


class _Mark:
    """`pytest.mark`: keeps parametrizations on the function, ignores the rest; a true skip condition ends the run."""

    def parametrize(self, names: str | tuple[str, ...], values: Any) -> Callable[[Any], Any]:
        """Add the values of one argument, or of several: their names in a tuple, or separated by commas."""
        split = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)

        def mark(test: Any) -> Any:
            test.cases = [*getattr(test, "cases", []), (split, list(values))]
            return test

        return mark

    def skipif(self, condition: bool, *, reason: str) -> Callable[[Any], Any]:
        """End the run if the condition holds."""
        if condition:
            sys.exit(f"skipped: {reason}")
        return lambda test: test

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        """Return any other mark, which changes nothing."""
        return lambda test: test


def _stand_in() -> types.ModuleType:
    module: Any = types.ModuleType("pytest")
    module.mark = _Mark()
    module.fixture = lambda autouse: _used_by_all
    module.approx = _Near
    return module  # type: ignore[no-any-return]


def _used_by_all(fixture: Any) -> Any:
    fixture.is_used_by_all = True
    return fixture


class _Near:
    """`pytest.approx` of one number."""

    def __init__(self, wanted: float, abs: float) -> None:  # noqa: A002 - as pytest names it
        self._wanted, self._abs = wanted, abs

    def __eq__(self, found: object) -> bool:
        return isinstance(found, int | float) and math.isclose(found, self._wanted, rel_tol=0.0, abs_tol=self._abs)

    __hash__ = None  # type: ignore[assignment]


def calls_of(test: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each of a test's cases."""
    cases = getattr(test, "cases", [])
    for chosen in itertools.product(*(values for _, values in cases)):
        arguments: dict[str, Any] = {}
        for (names, _), value in zip(cases, chosen, strict=True):
            arguments |= dict(zip(names, value if len(names) > 1 else (value,), strict=True))
        yield arguments


def run(path: str) -> int:
    """Run a file's tests and print a line for each. Return the number of failures."""
    sys.modules["pytest"] = _stand_in()
    spec = importlib.util.spec_from_file_location("plainly_run", path)
    assert spec is not None and spec.loader is not None, path  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module there
    spec.loader.exec_module(module)
    functions = dict(inspect.getmembers(module, inspect.isfunction))
    before = [one for one in functions.values() if getattr(one, "is_used_by_all", False)]
    tests = [(name, one) for name, one in functions.items() if name.startswith("test_")]
    return sum(not _passes(name, one, arguments, before) for name, one in tests for arguments in calls_of(one))


def _passes(name: str, test: Any, arguments: dict[str, Any], before: list[Any]) -> bool:
    began_s = time.monotonic()
    try:
        for fixture in before:
            fixture()
        test(**arguments)
    except Exception:  # noqa: BLE001 - one test's failure must not end the others
        traceback.print_exc(file=sys.stdout)
        _say(f"FAILED {name} {arguments}")
        return False
    _say(f"passed {name} {arguments} in {time.monotonic() - began_s:.1f} s")
    return True


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]) > 0)
