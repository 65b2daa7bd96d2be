"""The shared stack as one of containers."""

from collections.abc import Iterator

import pytest

from tests.support.stacks.compose_stack import ComposeStack
from tests.support.stacks.stack import Stack


@pytest.fixture
def composed(stack: Stack) -> Iterator[ComposeStack]:
    """The shared stack, when it is one of containers."""
    if not isinstance(stack, ComposeStack):
        pytest.skip("needs a stack of containers: make test-compose")
    stack.until_healthy()
    yield stack
    stack.until_healthy()
