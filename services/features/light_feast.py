"""Imports Feast without what nobody here uses of it: torch, and its own metrics.

Feast loads torch at import when it is installed, for one conversion: hiding it saves about 180 MB and a second in each
process that only reads or writes features; a process that has torch already, or imports it later, is not affected. Feast's
server metrics would land among ours in the folder that the processes of a node share, or in a temporary folder for each
process, which stays when the process is killed: they are kept in the process.
"""

import os
import sys
import tempfile
from types import ModuleType

from prometheus_client import values

_ASKED_FOR_BY_FEAST = "PROMETHEUS_MULTIPROCESS_DIR"
_SET_BY_FEAST = "PROMETHEUS_MULTIPROC_DIR"


def import_feast() -> ModuleType:
    """Give the feast package. While it is imported for the first time, torch looks as if it were not installed."""
    if "feast" in sys.modules:
        return sys.modules["feast"]
    hide_torch = "torch" not in sys.modules
    shared, values.ValueClass = values.ValueClass, values.MutexValue
    before = {name: os.environ.get(name) for name in (_ASKED_FOR_BY_FEAST, _SET_BY_FEAST)}
    os.environ.setdefault(_ASKED_FOR_BY_FEAST, tempfile.gettempdir())
    if hide_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes its import fail, as documented
    try:
        import feast
    finally:
        values.ValueClass = shared
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if hide_torch:
            del sys.modules["torch"]
    return feast
