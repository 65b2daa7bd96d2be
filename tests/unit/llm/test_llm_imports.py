"""What the LLM's parts may load: the engine no service library, the handle no torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        (
            "services.llm.engine.engine",
            ("ray", "feast", "prometheus_client", "structlog", "pyarrow", "pydantic", "grpc", "pandas"),
        ),
        ("services.llm.handle", ("torch", "services.llm.deployment")),
        ("services.llm.engine.scheduler", ("torch",)),
        ("services.llm.engine.block_pool", ("torch", "numpy")),
    ],
)
def test_importing_loads_nothing_that_is_banned(module, banned) -> None:
    """A fresh interpreter that imports the module has none of the banned ones loaded."""
    code = f"import sys, {module}; print([name for name in {banned!r} if name in sys.modules])"

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"
