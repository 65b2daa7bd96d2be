"""Fixtures for fault tests, in addition to the stack."""

from collections.abc import Iterator

import pytest

from tests.support.stacks.stack import Stack


@pytest.fixture
def healthy(stack: Stack) -> Iterator[None]:
    """Each test starts and ends with a healthy stack and an idle standby."""
    stack.until_healthy()
    yield
    stack.until_healthy()
