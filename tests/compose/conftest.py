"""The shared stack as one of containers."""

from collections.abc import Iterator

import pytest

from tests.support.compose_stack import ComposeStack
from tests.support.stack import Stack
from tests.support.wait import wait_for


@pytest.fixture
def composed(stack: Stack) -> Iterator[ComposeStack]:
    """The shared stack, when it is one of containers."""
    if not isinstance(stack, ComposeStack):
        pytest.skip("needs a stack of containers: make test-compose")
    wait_for(stack.is_healthy, 120.0, "a healthy stack before the test")
    yield stack
    wait_for(stack.is_healthy, 120.0, "a healthy stack after the test")
