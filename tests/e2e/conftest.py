"""What tests of faults share beside the stack."""

from collections.abc import Iterator

import pytest

from tests.support.stacks.stack import Stack


@pytest.fixture
def healthy(stack: Stack) -> Iterator[None]:
    """The test starts from a healthy stack whose standby is idle, and leaves one behind."""
    stack.until_healthy()
    yield
    stack.until_healthy()
