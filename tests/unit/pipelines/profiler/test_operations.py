"""FLOPs from shapes against torch's counter, bytes by hand, the roofline, and the most expensive operations."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pipelines.profiler.events import ActivityKind, Trace
from pipelines.profiler.kernels import is_product_kernel
from pipelines.profiler.names import is_communication, is_input, is_product_operation, is_waiting_frame
from pipelines.profiler.operations import Cost, cost_of, limits_of, most_expensive
from pipelines.profiler.trace import read_traces
from tests.support.profiler.traces import kernel, operation, write

A100 = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]
MEASURED = {"dtype": "fp32", "flops_per_s": 3e11, "bytes_per_s": 2e10, "operations": {}}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Trace]:
    """Return a function that writes events as a trace with these facts and reads it."""

    def trace_of(*events: dict[str, Any], **about: Any) -> Trace:
        (trace,) = read_traces([write(tmp_path / "it.json", list(events), **about)])
        return trace

    return trace_of


def cost_in(trace: Trace) -> Cost | None:
    """Return the cost of a trace's only operation."""
    (operation,) = trace.of(ActivityKind.OPERATION)
    return cost_of(operation)


def recorded(step, tmp_path: Path) -> Trace:
    """Record a step with shapes by torch."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "step.json"))
    (trace,) = read_traces([tmp_path / "step.json"])
    return trace


def layers() -> None:
    """Run products of two, three and batched dimensions, forward and backward."""
    net = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8, bias=False))
    net(torch.randn(5, 7, 24)).sum().backward()
    torch.bmm(torch.randn(3, 5, 6), torch.randn(3, 6, 7))
    torch.baddbmm(torch.randn(3, 5, 7), torch.randn(3, 5, 6), torch.randn(3, 6, 7))


def test_flops_of_products_are_those_of_torch_s_counter(tmp_path: Path) -> None:
    """Products are counted once, forward and backward, under any caller."""
    with FlopCounterMode(display=False) as counter:
        layers()

    trace = recorded(layers, tmp_path)

    leaves = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm")}
    costs = [cost_of(operation) for operation in trace.of(ActivityKind.OPERATION) if operation.name in leaves]
    assert sum(cost.flops for cost in costs) == counter.get_total_flops()


def test_flops_of_attention_are_those_of_torch_s_formulas(tmp_path: Path) -> None:
    """Attention counts two products forward and five backward, over full squares."""
    shape = (2, 4, 48, 32)

    def attention() -> None:
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    trace = recorded(attention, tmp_path)

    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    flops = {
        operation.name: cost_of(operation).flops
        for operation in trace.of(ActivityKind.OPERATION)
        if operation.name.startswith(name)
    }
    assert flops == {
        name: sdpa_flop_count(shape, shape, shape),
        f"{name}_backward": sdpa_backward_flop_count(shape, shape, shape, shape),
    }


@pytest.mark.parametrize(
    ("name", "dims", "types", "flops", "num_bytes"),
    [
        ("aten::mm", [[4, 8], [8, 16]], ["float", "float"], 2 * 4 * 8 * 16, 4 * (32 + 128 + 64)),
        ("aten::mv", [[4, 8], [8]], ["c10::BFloat16", "c10::BFloat16"], None, 2 * (32 + 8 + 32)),
        ("aten::add", [[10], [10], []], ["float", "float", "Scalar"], 10, 4 * 30),
        ("aten::copy_", [[10], [10], []], ["double", "float", ""], 10, 10 * 8 + 10 * 4),
        ("aten::sum", [[10, 10]], ["long int"], 100, 800),
        ("aten::cat", [[[5, 2], [6, 2]], []], ["TensorList", "Scalar"], None, 4 * 2 * (10 + 12)),
    ],
)
def test_bytes_are_each_input_once_and_the_output(read, name: str, dims, types, flops, num_bytes) -> None:
    """Bytes follow the recorded types; an element of an operation that is not a product counts one FLOP."""
    cost = cost_in(read(operation(name, 0, 1, **{"Input Dims": dims, "Input type": types})))

    assert cost is not None
    assert cost.num_bytes == num_bytes
    assert flops is None or cost.flops == flops


@pytest.mark.parametrize("dims", [None, [], [[]], "nonsense", [["a"]], [[-1, 2], [2, 2]], [[2, 3]]])
def test_without_usable_shapes_there_is_no_cost(read, dims) -> None:
    """Without usable shapes the cost is None."""
    about = {"Input Dims": dims, "Input type": ["float", "float"]}

    assert cost_in(read(operation("aten::mm", 0, 1, **about))) is None


def test_kernels_count_for_the_operation_that_launched_them(read) -> None:
    """Kernels belong to the operation that launched them, and the roofline fraction uses the data sheet's limits."""
    shapes = {"Input Dims": [[1024, 1024], [1024, 1024]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = [
        operation("aten::linear", 0, 30),
        operation("aten::mm", 5, 20, **shapes),
        operation("cudaLaunchKernel", 10, 5, category="cuda_runtime", correlation=77),
        operation("cudaLaunchKernel", 16, 5, category="cuda_runtime", correlation=78),
        kernel("nvjet_hsh_128x64", 20, 15, correlation=77, **{"External id": 77}),
        kernel("splitKreduce_kernel", 35, 5, correlation=78, **{"External id": 78}),
        kernel("of nobody", 50, 1, correlation=99),
    ]
    trace = read(*events, deviceProperties=A100)
    work = [(kernel, kernel.duration_us) for kernel in trace.of(ActivityKind.KERNEL)]

    first, second = most_expensive(trace, 100.0, work)

    assert (first.name, first.calls, first.time_us, first.share) == ("aten::mm", 1, 20, 0.2)
    assert first.roofline_share == pytest.approx(2 * 1024**3 / 312e12 / 20e-6)
    assert (second.name, second.roofline_share) == ("of nobody", None)


SQUARES = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["float", "float"]}


@pytest.mark.parametrize(
    ("launcher", "name", "bound", "has_roofline"),
    [
        ("aten::mm", "ampere_sgemm_128x64_nn", "compute", True),
        ("CompiledFunctionBackward", "ampere_sgemm_128x64_nn", "compute", False),
        ("Torch-Compiled Region: 0/0", "my_kernel", "unknown", False),
        ("my_library::attention", "ampere_sgemm_128x64_nn", "compute", False),
        ("aten::mm", "my_kernel", "compute", True),
        ("aten::add", "my_kernel", "memory", True),
        ("my_library::step", "my_kernel", "unknown", False),
    ],
)
def test_only_a_known_operation_explains_its_kernels(
    read, launcher: str, name: str, bound: str, has_roofline: bool
) -> None:
    """Compiled regions do not explain their kernels; a kernel of unknown name takes its operation's kind."""
    events = [
        operation(launcher, 0, 20, **SQUARES),
        operation("cudaLaunchKernel", 5, 5, category="cuda_runtime", correlation=1),
        kernel(name, 30, 20_000, correlation=1),
    ]
    trace = read(*events, deviceProperties=A100)

    (row,) = most_expensive(trace, 20_000.0, [(event, event.duration_us) for event in trace.of(ActivityKind.KERNEL)])

    assert (row.bound, row.roofline_share is not None) == (bound, has_roofline)


def test_more_flops_than_the_device_has_are_no_roofline(read) -> None:
    """If the FLOPs exceed the device's peak, the shapes are wrong and the roofline fraction is None."""
    trace = read(operation("aten::mm", 0, 100, **SQUARES), tailrace=MEASURED)

    (row,) = most_expensive(trace, 100.0, [(event, event.duration_us) for event in trace.of(ActivityKind.OPERATION)])

    assert row.roofline_share is None


def test_the_rows_of_attention_come_before_its_heads_in_some_operations(read) -> None:
    """Operations with (batch, rows, heads, size) and (batch, heads, rows, size) give the same FLOPs."""
    rows_first, heads_first = [[2, 512, 8, 64]] * 3, [[2, 8, 512, 64]] * 3
    types = ["c10::BFloat16"] * 3
    costs = [
        cost_in(read(operation(f"aten::{name}", 0, 1, **{"Input Dims": dims, "Input type": types})))
        for name, dims in (
            ("_flash_attention_forward", rows_first),
            ("_efficient_attention_forward", rows_first),
            ("_scaled_dot_product_cudnn_attention", heads_first),
        )
    ]

    assert {cost and cost.flops for cost in costs} == {sdpa_flop_count(*heads_first)}


@pytest.mark.parametrize(
    ("about", "bytes_per_s"),
    [
        ({"deviceProperties": A100}, 2039e9),
        ({"deviceProperties": A100, "tailrace": MEASURED}, 2e10),
        ({"deviceProperties": [{"id": 0, "name": "Some Radeon"}]}, None),
        ({"deviceProperties": {"id": 0}, "tailrace": {"dtype": 3}}, None),
    ],
)
def test_limits_are_measured_ones_before_the_data_sheet_s(read, about, bytes_per_s: float | None) -> None:
    """Measured limits take precedence over the data sheet; an unknown device has no limits."""
    limits = limits_of(read(kernel("k", 0, 1), **about))

    assert (limits and limits.bytes_per_s) == bytes_per_s


@pytest.mark.parametrize(
    ("is_one", "these", "others"),
    [
        (
            is_product_kernel,
            (
                "ampere_sgemm_32x32_sliced1x4_tn",
                "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4>(cutlass_80_tensorop)",
                "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1",
                "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32",
                "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
                "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>>(Flash_fwd_params)",
                "triton_tem_fused_addmm_relu_3",
            ),
            (
                "void gemv2T_kernel_val<int, int, float>(float)",
                "triton_poi_fused_addmm_relu_3",
                "triton_red_fused_native_layer_norm_1",
                "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct)",
                "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
                "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(cudnn::ops::nchw2nhwc_params_t)",
            ),
        ),
        (
            lambda name: is_product_operation(f"aten::{name}"),
            ["mm", "addmm", "bmm", "_int_mm", "convolution_backward", "mkldnn_convolution", "linalg_qr", "lstm"],
            [
                "mv",
                "add_",
                "upsample_bilinear2d",
                "linalg_vector_norm",
                "native_layer_norm",
                "_softmax",
                "copy_",
                "embedding",
            ],
        ),
        (
            is_communication,
            (
                "ncclDevKernel_AllGather_RING_LL",
                "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)",
                "gloo:all_reduce",
            ),
            (
                "triton_poi_fused_all_gather_into_tensor_add_0",
                "triton_red_fused_all_reduce_norm_1",
                "void all_reduce_bucket()",
            ),
        ),
        (
            is_input,
            (
                "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
                *("## data_load ##", "load_batch", "nextBatch", "data"),
            ),
            (
                *("DistributedDataParallel.forward", "load_state_dict", "train_batch", "forward"),
                *("## all2all_data:kjt ##", "step 3"),
            ),
        ),
        (
            is_waiting_frame,
            ("<built-in function sleep>", "train.py(12): get_batch"),
            ("train.py(12): evaluate",),
        ),
    ],
    ids=[
        "kernels that are products",
        "operations that are products",
        "collectives",
        "ranges of input",
        "frames that wait",
    ],
)
def test_what_a_name_says(is_one: Callable[[str], bool], these: Sequence[str], others: Sequence[str]) -> None:
    """Products are recognised by library names, collectives, input ranges and waiting frames by their words."""
    assert [name for name in these if not is_one(name)] == []
    assert [name for name in others if is_one(name)] == []
