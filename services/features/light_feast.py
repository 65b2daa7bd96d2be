"""Imports Feast without what nobody here uses of it: torch, and its own metrics.

Feast loads torch at import when it is installed, for one conversion: hiding it saves about 180 MB and a second in each
process that only reads or writes features; a process that has torch already, or imports it later, is not affected. Feast's
server metrics would land among ours in the folder that the processes of a node share, or in a temporary folder for each
process, which stays when the process is killed: they are kept in the process.
"""

import sys
import tempfile
from types import ModuleType

from prometheus_client import values

from services.settings.settings import environment_kept


def import_feast() -> ModuleType:
    """Return the feast package. While it is imported for the first time, torch looks as if it were not installed."""
    if "feast" in sys.modules:
        return sys.modules["feast"]
    hide_torch = "torch" not in sys.modules
    shared, values.ValueClass = values.ValueClass, values.MutexValue
    if hide_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # makes its import fail, as documented
    try:
        with environment_kept(PROMETHEUS_MULTIPROCESS_DIR=tempfile.gettempdir(), PROMETHEUS_MULTIPROC_DIR=None):
            import feast
    finally:
        values.ValueClass = shared
        if hide_torch:
            del sys.modules["torch"]
    return feast
