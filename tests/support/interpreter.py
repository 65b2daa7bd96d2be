"""Patch Triton's interpreter, which multiplies bf16 numbers as integers."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def multiply_bf16_as_numbers() -> None:
    """Widen bf16 operands of `tl.dot` to fp32, exactly, as tensor cores do; compiled kernels are unchanged."""
    builder = interpreter.InterpreterBuilder
    if not hasattr(builder, "narrow_dot"):
        builder.narrow_dot = builder.create_dot
        builder.create_dot = _create_dot


def _create_dot(builder: Any, a: Any, b: Any, *arguments: Any) -> Any:
    return builder.narrow_dot(_widened(a), _widened(b), *arguments)


def _widened(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    numbers = (operand.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(numbers, tl.float32)
