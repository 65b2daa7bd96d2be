"""Minimal cost of an operation: FLOPs and bytes from recorded shapes, its roofline, and the slowest operations.

The roofline fraction is the least time that the work needs on this device (the longer of FLOPs over peak and bytes over
bandwidth) over the time that it took. Peaks come from the planner's data sheets, by the device's name in the trace, or
were measured by our own recorder. Without peaks, or without shapes (`record_shapes=True`), the fraction is unknown.
Bytes count each input once and the output once, so an operation whose data stays in a cache may exceed 1.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.planner.devices import device_of_driver
from pipelines.profiler.events import ActivityKind, Trace, TraceEvent
from pipelines.profiler.kernels import Bound, dtype_in, work_of
from pipelines.profiler.names import is_communication, is_compiled, is_product_operation

_BYTES = {
    "float": 4, "double": 8, "c10::half": 2, "half": 2, "c10::bfloat16": 2, "bfloat16": 2, "long": 8, "long int": 8,
    "int": 4, "short": 2,
    "short int": 2, "bool": 1, "unsigned char": 1, "signed char": 1, "char": 1, "c10::float8_e4m3fn": 1,
    "c10::float8_e5m2": 1,
    "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "prod", "norm", "linalg_vector_norm", "max", "min", "argmax", "argmin", "any", "all", "item",
    "copy_",
}  # fmt: skip
"""Operations whose output is small, or is among their inputs."""
_JOINS = {"cat", "stack"}
_PRODUCTS = {"mm": 0, "bmm": 0, "matmul": 0, "linear": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1}
"""Matrix products, with the place of the first factor among the inputs."""
_KNOWN_SPACES = ("aten::", "prims::", "mkldnn::")
"""Namespaces whose operation names imply the work. Shapes do not tell the work of compiled regions or libraries."""
_NUM_SHOWN = 3
_LARGEST = 2**63
"""Upper bound on the elements of a tensor."""
_RIDGE_OF_CPUS = 10.0
"""FLOPs per byte above which a CPU of unknown limits is compute-bound: 0.3 to 3 TFLOP/s at 20 to 300 GB/s."""
_RIDGE_OF_GPUS = 12.0
"""The same for an unknown GPU: an A100's in fp32, the lowest among today's training GPUs."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The FLOPs and bytes that the work of one call needs at least."""

    flops: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Limits:
    """FLOP/s by dtype, and bytes per second."""

    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    source: str

    def least_s(self, cost: Cost, dtype: str | None) -> float:
        """Return the least time of this work; for an unknown dtype, with the highest FLOP/s."""
        return max(cost.flops / self.rate(dtype), cost.num_bytes / self.bytes_per_s)

    def ridge(self, dtype: str | None) -> float:
        """Return the FLOPs per byte above which work is compute-bound."""
        return self.rate(dtype) / self.bytes_per_s

    def rate(self, dtype: str | None) -> float:
        """Return the FLOP/s of a dtype, or of the nearest known dtype."""
        if dtype is None:
            return max(self.flops_per_s.values())
        return self.flops_per_s.get(dtype) or self.flops_per_s.get("fp32") or max(self.flops_per_s.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """All calls of an operation. `share` is of the span; `roofline_share` is None if it cannot be computed."""

    name: str
    calls: int
    time_us: float
    share: float
    bound: str
    flops: float | None
    num_bytes: float | None
    roofline_share: float | None


def limits_of(trace: Trace) -> Limits | None:
    """Return the limits of the trace's first device, measured or from the data sheet."""
    measured = trace.measured
    if measured is not None:
        return Limits({measured.dtype: measured.flops_per_s}, measured.bytes_per_s, "measured")
    device = next((event.device for event in trace.events if event.is_on_device), None)
    sheet = None if device is None else device_of_driver(trace.device_names.get(device, ""))
    return None if sheet is None else Limits(sheet.flops_per_s, sheet.memory_bytes_per_s, sheet.name)


def bounds_of(trace: Trace, events: Sequence[TraceEvent]) -> list[Bound]:
    """Return the bound of each operation or kernel, by shapes and intensity if recorded, else by name."""
    limits, launchers = limits_of(trace), _Launchers(trace)
    plain = _RIDGE_OF_GPUS if trace.is_of_gpu else _RIDGE_OF_CPUS
    bounds = []
    for event in events:
        source = launchers.of(event)
        work, whole = _work(event, source), _whole_cost(trace, event.name)
        cost = whole if whole is not None else cost_of(source) if work is Bound.COMPUTE else None
        if cost is not None:
            ridge = plain if limits is None else limits.ridge(_dtype(event, source))
            bounds.append(Bound.COMPUTE if cost.flops >= ridge * cost.num_bytes else Bound.MEMORY)
        else:
            bounds.append(work)
    return bounds


def _work(event: TraceEvent, source: TraceEvent) -> Bound:
    """Return the kind of work by the kernel's name, else by the operation that launched it."""
    if event.kind is ActivityKind.COPY:
        return Bound.MEMORY
    named = work_of(event.name) if event.is_on_device else Bound.UNKNOWN
    if named is not Bound.UNKNOWN or source.is_on_device or is_compiled(source.name):
        return named
    if is_product_operation(source.name):
        return Bound.COMPUTE
    return Bound.MEMORY if not event.is_on_device or source.name.startswith("aten::") else Bound.UNKNOWN


def _dtype(event: TraceEvent, source: TraceEvent) -> str | None:
    """Return the operands' dtype; None for a compiled region, whose inputs do not tell its kernels' dtype."""
    recorded = None if is_compiled(source.name) else dtype_of(source)
    return recorded or (dtype_in(event.name) if event.is_on_device else None)


def dtype_of_products(trace: Trace, events: Sequence[TraceEvent]) -> str | None:
    """Return the dtype of most of the products' time, None if it is unknown for half of the time."""
    launchers = _Launchers(trace)
    times: dict[str | None, float] = defaultdict(float)
    for event in events:
        source = launchers.of(event)
        if _work(event, source) is Bound.COMPUTE:
            times[_dtype(event, source)] += event.duration_us
    most = max(times, key=lambda dtype: times[dtype], default=None)
    return most if 2 * times[most] > sum(times.values()) else None


def most_expensive(trace: Trace, span_us: float, work: Sequence[tuple[TraceEvent, float]]) -> list[OperationCost]:
    """Return the three operations that took the longest.

    `work` holds each call or kernel with its time in us; kernels count for the operation that launched them.
    """
    limits, launchers = limits_of(trace), _Launchers(trace)
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, dict[int, TraceEvent]] = defaultdict(dict)
    bounds_us: dict[str, Counter[Bound]] = defaultdict(Counter)
    dtypes: dict[int, str | None] = {}
    for (event, time_us), bound in zip(work, bounds_of(trace, [event for event, _ in work]), strict=True):
        source = launchers.of(event)
        times[source.name] += time_us
        calls[source.name][id(source)] = source
        bounds_us[source.name][bound] += int(1e3 * time_us)
        dtypes[id(source)] = _dtype(event, source)
    longest = sorted(times, key=lambda name: -times[name])[:_NUM_SHOWN]
    rows = []
    for name in longest:
        sources, time_us = list(calls[name].values()), times[name]
        whole = _whole_cost(trace, name)
        costs = [cost_of(source) for source in sources] if whole is None else [whole]
        known = [cost for cost in costs if cost is not None]
        is_known = len(known) == len(costs) and not is_communication(name)
        roofline = None
        if is_known and limits is not None and time_us > 0:
            least_s = sum(
                limits.least_s(cost, dtypes[id(source)]) for cost, source in zip(known, sources, strict=False)
            )
            roofline = 1e6 * least_s / time_us if _is_possible(known, limits, time_us) else None
        rows.append(
            OperationCost(
                name=name,
                calls=len(sources),
                time_us=time_us,
                share=time_us / span_us if span_us > 0 else 0.0,
                bound="links" if is_communication(name) else bounds_us[name].most_common(1)[0][0].value,
                flops=sum(cost.flops for cost in known) if is_known else None,
                num_bytes=sum(cost.num_bytes for cost in known) if is_known else None,
                roofline_share=roofline,
            )
        )
    return rows


def _is_possible(costs: Sequence[Cost], limits: Limits, time_us: float) -> bool:
    """Whether the device can have done these FLOPs in this time; if not, the shapes do not describe its work."""
    return sum(cost.flops for cost in costs) <= 1.1e-6 * time_us * max(limits.flops_per_s.values())


def _whole_cost(trace: Trace, name: str) -> Cost | None:
    """Return the total cost of all calls of compiled code that `record` noted; None for other operations."""
    noted = trace.measured.operations if trace.measured is not None else {}
    return Cost(*noted[name]) if name in noted else None


class _Launchers:
    """Finds the host operation of a kernel or copy: the innermost around the launch with its correlation number.

    Traces of some versions lack these calls; then Kineto's external id identifies it, which in others is the
    correlation number itself.
    """

    def __init__(self, trace: Trace) -> None:
        operations = trace.of(ActivityKind.OPERATION) if trace.is_of_gpu else []
        self._by_id = {_number_of(operation, "External id"): operation for operation in operations}
        self._by_correlation: dict[int | None, TraceEvent] = {}
        stacks: dict[tuple[Any, Any], list[TraceEvent]] = defaultdict(list)
        for event in trace.of(ActivityKind.OPERATION, ActivityKind.RUNTIME) if operations else []:
            stack = stacks[event.thread]
            while stack and stack[-1].end_us < event.end_us:
                stack.pop()
            if event.kind is ActivityKind.OPERATION:
                stack.append(event)
            elif stack:
                self._by_correlation[_number_of(event, "correlation")] = stack[-1]

    def of(self, event: TraceEvent) -> TraceEvent:
        """Return the operation; the event itself for host events, collectives and missing launches."""
        if not event.is_on_device or is_communication(event.name):
            return event
        correlation, external = _number_of(event, "correlation"), _number_of(event, "External id")
        if correlation is not None and correlation in self._by_correlation:
            return self._by_correlation[correlation]
        return event if external in {None, correlation} else self._by_id.get(external, event)


def _number_of(event: TraceEvent, name: str) -> int | None:
    value = event.args.get(name)
    return value if isinstance(value, int) else None


def dtype_of(event: TraceEvent) -> str | None:
    """Return the data sheet's name of the first floating-point input's dtype; None if not recorded."""
    for name in _types(event):
        if "float8" in name:
            return "fp8"
        if "half" in name or "bfloat16" in name:
            return "bf16"
        if name in {"float", "double"}:
            return "fp32"
    return None


def cost_of(event: TraceEvent) -> Cost | None:
    """Return the least work of a call, None if its shapes were not recorded or are not understood."""
    dims, base = event.args.get("Input Dims"), event.name.rpartition("::")[2]
    if not isinstance(dims, list) or not event.name.startswith(_KNOWN_SPACES):
        return None
    inputs = [
        _BYTES.get(name, 4 if name.startswith("tensorlist") else 0) * math.prod(shape)
        for input_dims, name in zip(dims, _types(event), strict=False)
        for shape in _shapes(input_dims)
    ]
    flops = _flops(base, dims)
    if flops is None or not inputs:
        return None
    if (product := _product(base, dims)) is not None:
        output = product[1] * next((_BYTES[name] for name in _types(event) if name in _BYTES), 4)
    elif base in _JOINS:
        output = sum(inputs)
    else:
        output = 0 if base in _REDUCTIONS else max(inputs)
    num_bytes = sum(inputs) + output
    return Cost(flops, num_bytes) if num_bytes > 0 else None


def _shapes(dims: Any) -> list[list[int]]:
    """Return the shapes of a tensor or of a list of tensors; empty for anything else."""
    if isinstance(dims, list) and dims and all(isinstance(member, list) for member in dims):
        return [member for member in dims if _is_shape(member)]
    return [dims] if _is_shape(dims) else []


def _types(event: TraceEvent) -> list[str]:
    types = event.args.get("Input type")
    return [str(name).lower() for name in types] if isinstance(types, list) else []


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(size, int) and 0 <= size < _LARGEST for size in value)
        and math.prod(value) < _LARGEST
    )


def _flops(base: str, dims: Sequence[Any]) -> float | None:
    """Return the FLOPs of a call; None for products that are not understood.

    A product counts two per multiply-add, any other operation one per element.
    """
    if base in _PRODUCTS or "convolution" in base or "attention" in base:
        multiply_adds = _multiply_adds(base, dims)
        return None if multiply_adds is None else 2.0 * multiply_adds
    if is_product_operation(f"aten::{base}"):
        return None
    return float(max((math.prod(shape) for input_dims in dims for shape in _shapes(input_dims)), default=0))


def _multiply_adds(base: str, dims: Sequence[Any]) -> float | None:
    if "attention" in base:
        return _attention(base, dims)
    if "convolution" in base:  # of a forward pass, the output's size depends on padding and strides, not on shapes
        shapes = [shape for shape in dims if _is_shape(shape)]
        is_known = base == "convolution_backward" and len(shapes) >= 3
        return 2.0 * _convolution(shapes[2], shapes[0]) if is_known else None
    product = _product(base, dims)
    return None if product is None else product[0]


def _convolution(weight: Sequence[int], output: Sequence[int]) -> float:
    """Return the multiply-adds of one pass: each output element is a sum over a filter."""
    return float(math.prod(output) * math.prod(weight[1:]))


def _attention(base: str, dims: Sequence[Any]) -> float | None:
    """Return the multiply-adds of queries, keys and values, as full squares; a backward pass takes 2.5 times as many.

    Shapes are (batch, heads, rows, size), or for the operations of `_ROWS_BEFORE_HEADS` (batch, rows, heads, size).
    Packed sequences are not understood.
    """
    first = 1 if "backward" in base else 0
    operands = [shape for shape in dims[first : first + 3] if _is_shape(shape) and len(shape) == 4]
    if len(operands) < 3:
        return None
    query, key, value = operands
    keys = key[1] if base.startswith(_ROWS_BEFORE_HEADS) else key[2]
    forward = math.prod(query[:3]) * keys * (query[3] + value[3])
    return float(forward) * (2.5 if first else 1.0)


_ROWS_BEFORE_HEADS = ("_flash_attention", "_efficient_attention")


def _product(base: str, dims: Sequence[Any]) -> tuple[float, float] | None:
    """Return the multiply-adds of a matrix product, and the elements of its output; None for other operations."""
    first = _PRODUCTS.get(base, 0)
    operands = [shape for shape in dims[first : first + 2] if _is_shape(shape)]
    if base not in _PRODUCTS or len(operands) < 2:
        return None
    left, right = operands
    columns = right[0] if base == "linear" else right[-1] if len(right) > 1 else 1
    return float(math.prod(left) * columns), float(math.prod(left[:-1]) * columns)
