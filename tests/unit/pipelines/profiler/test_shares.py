"""Parts and fractions of a span, against a loop over whole microseconds."""

import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from pipelines.profiler.activity import activity_of
from pipelines.profiler.report import as_json, profile_of
from pipelines.profiler.shares import parts_of, shares_of
from pipelines.profiler.trace import read_traces
from tests.support.profiler.traces import kernel, memcpy, memset, operation, write

GEMM, ADD, SUM = (
    "ampere_sgemm_128x64_nn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
)
MAKERS = {
    "compute": lambda start, length, stream: kernel(GEMM, start, length, stream=stream),
    "memory": lambda start, length, stream: kernel(ADD, start, length, stream=stream),
    "communication": lambda start, length, stream: kernel(SUM, start, length, stream=stream),
    "copy": lambda start, length, stream: memcpy(start, length, stream=stream),
    "fill": lambda start, length, stream: memset(start, length, stream=stream),
}
ACTIVITIES = st.lists(
    st.tuples(st.sampled_from(sorted(MAKERS)), st.integers(0, 60), st.integers(1, 15), st.integers(1, 4)),
    min_size=1,
    max_size=20,
)


def marked(activities) -> dict[str, int]:
    """Assign each microsecond of the span to the first kind that runs in it, and count."""
    first = min(start for _, start, _, _ in activities)
    last = max(start + length for _, start, length, _ in activities)
    counts = dict.fromkeys(
        ("span_us", "compute_us", "communication_exposed_us", "copy_exposed_us", "idle_us", "communication_hidden_us"),
        0,
    )
    for moment in range(first, last):
        running = {kind for kind, start, length, _ in activities if start <= moment < start + length}
        counts["span_us"] += 1
        if running & {"compute", "memory"}:
            counts["compute_us"] += 1
            counts["communication_hidden_us"] += "communication" in running
        elif "communication" in running:
            counts["communication_exposed_us"] += 1
        elif running:
            counts["copy_exposed_us"] += 1
        else:
            counts["idle_us"] += 1
    return counts


@given(ACTIVITIES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_parts_are_those_of_marked_microseconds(tmp_path: Path, activities) -> None:
    """Compute takes precedence over communication, copies and idle time, and the parts add up."""
    events = [MAKERS[kind](1_000 + start, length, stream) for kind, start, length, stream in activities]

    (trace,) = read_traces([write(tmp_path / "random.json", events)])
    row = as_json([profile_of(trace)])

    for name, value in marked(activities).items():
        assert row[name] == pytest.approx(value, abs=1e-6), name
    parts = ("compute_us", "communication_exposed_us", "copy_exposed_us", "idle_us")
    assert sum(row[name] for name in parts) == pytest.approx(row["span_us"])
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["ranks"][0]["span_us"] == row["span_us"]


def test_what_runs_beside_a_collective_hides_it(tmp_path: Path) -> None:
    """Overlapped communication is a separate fraction, and compute is split by its bound."""
    events = [kernel(GEMM, 0, 40), kernel(SUM, 30, 40, stream=20), kernel(ADD, 60, 40)]

    (trace,) = read_traces([write(tmp_path / "overlap.json", events)])
    shares = shares_of(activity_of(trace))

    assert (shares.compute, shares.memory) == (0.3, 0.3)
    assert (shares.communication_hidden, shares.communication_exposed) == (0.2, 0.2)


@pytest.mark.parametrize(
    "name",
    [
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "void rcclKernel(int)",
        "mscclKernel_Sum_half_LL",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(RankData*)",
    ],
)
def test_collectives_of_every_library_are_communication(tmp_path: Path, name: str) -> None:
    """Collectives are recognised by the old and new names of NCCL, by RCCL's, and by names of custom all-reduces."""
    (trace,) = read_traces([write(tmp_path / "it.json", [kernel(name, 0, 10)])])

    assert parts_of(activity_of(trace)).communication_exposed_us == 10


def test_gaps_are_launches_waits_for_data_or_the_host(tmp_path: Path) -> None:
    """Short gaps are launches, gaps in a loader's range data waits, and long unexplained gaps host time."""
    events = [
        kernel(GEMM, 0, 100),
        kernel(GEMM, 150, 100),  # a gap of 50
        operation(
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 250, 2_000, category="user_annotation"
        ),
        kernel(GEMM, 2_250, 100),
        operation("aten::nonzero", 2_400, 1_900),
        kernel(GEMM, 4_350, 50),
    ]

    (trace,) = read_traces([write(tmp_path / "gaps.json", events)])
    activity = activity_of(trace)

    assert activity.launch.tolist() == [[100, 150]]
    assert activity.data_wait.tolist() == [[250, 2_250]]
    assert activity.host.tolist() == [[2_350, 4_350]]


WAIT, SAVE = "threading.py(359): wait", "train.py(88): write_checkpoint"
LOADER = "torch/utils/data/dataloader.py(733): __next__"


@pytest.mark.parametrize(
    ("frames", "share"),
    [
        ([(WAIT, 99)], "host"),
        ([(WAIT, 99), (SAVE, 1)], "host"),
        ([(LOADER, 99), (SAVE, 1)], "host"),
        ([(LOADER, 1)], "data_wait"),
        ([("trainer.py(9): validate", 1), (LOADER, 1), (WAIT, 1)], "data_wait"),
        ([(SAVE, 1), ("zipfile.py(900): read", 1), (WAIT, 1)], "host"),
        ([("train.py(5): main", 1), ("<built-in function sleep>", 1)], "data_wait"),
        ([("train.py(5): main", 1), ("torch/distributed/distributed_c10d.py(4): barrier", 1)], "communication_exposed"),
    ],
)
@pytest.mark.parametrize("has_correlations", [True, False])
def test_only_the_launching_thread_explains_a_gap(tmp_path: Path, frames, share: str, has_correlations: bool) -> None:
    """Waiting loaders, writers or monitors on other threads do not count; the innermost informative frame does."""
    events = []
    for step in range(4):
        number = {"correlation": step} if has_correlations else {}
        events += [
            operation("cudaLaunchKernel", 10_000 * step, 5, category="cuda_runtime", **number),
            kernel(GEMM, 10_000 * step + 10, 2_000, **number),
        ]
    for depth, (name, thread) in enumerate(frames):
        length = 40_000 - 2 * depth
        events.append(operation(name, depth, length, thread=thread, category="python_function"))

    (trace,) = read_traces([write(tmp_path / "frames.json", events)])
    shares = dict(shares_of(activity_of(trace)).items())

    assert shares[share] == pytest.approx(3 * 7_990 / 32_010, rel=0.01)


def test_a_loader_on_another_thread_hides_no_work(tmp_path: Path) -> None:
    """A loader on another thread does not turn compute or idle time into data wait."""
    loader = operation(
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 9_000, thread=9, category="user_annotation"
    )
    on_cpu = [loader, operation("aten::mm", 0, 9_000)]
    on_gpu = [
        loader,
        *(operation("aten::mm", 4_000 * step, 5) for step in range(3)),
        *(kernel(GEMM, 4_000 * step, 400) for step in range(3)),
    ]

    cpu, gpu = (
        dict(shares_of(activity_of(*read_traces([write(tmp_path / f"{name}.json", events)]))).items())
        for name, events in (("cpu", on_cpu), ("gpu", on_gpu))
    )

    assert (cpu["data_wait"], gpu["data_wait"]) == (0, 0)
    assert cpu["compute"] > 0.99


def test_several_devices_in_one_file_are_a_rank_with_a_row_each(tmp_path: Path) -> None:
    """A rank with several devices computes if any device computes."""
    events = [kernel(GEMM, 0, 40), kernel(GEMM, 20, 60, device=1), memcpy(90, 10)]

    (trace,) = read_traces([write(tmp_path / "two.json", events)])
    row = as_json([profile_of(trace)])

    assert (row["span_us"], row["compute_us"], row["copy_exposed_us"], row["idle_us"]) == (100, 80, 10, 10)
    assert (row["devices"]["0"]["span_us"], row["devices"]["0"]["compute_us"]) == (100, 40)
    assert (row["devices"]["1"]["span_us"], row["devices"]["1"]["compute_us"]) == (60, 60)


def test_on_a_cpu_the_innermost_operation_works_and_wrappers_do_not(tmp_path: Path) -> None:
    """Waiting wrappers do not compute, work in a loader's range is data wait, and overlapped collectives are hidden."""
    events = [
        operation("ProfilerStep#1", 0, 10_000, category="user_annotation"),
        operation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 3_000, category="user_annotation"),
        operation("aten::stack", 1_000, 1_000),
        operation("autograd::engine::evaluate_function: MmBackward0", 3_000, 5_000),
        operation("aten::mm", 3_000, 2_000),
        operation("gloo:all_reduce", 4_000, 4_000, thread=2, category="user_annotation"),
        operation("aten::add_", 8_000, 2_000),
    ]

    (trace,) = read_traces([write(tmp_path / "cpu.json", events)])
    activity = activity_of(trace)
    parts, shares = parts_of(activity), shares_of(activity)

    assert (parts.span_us, parts.compute_us) == (10_000, 4_000)
    assert (parts.communication_hidden_us, parts.communication_exposed_us) == (1_000, 3_000)
    assert activity.data_wait.tolist() == [[0, 3_000]]
    assert shares.memory == pytest.approx(0.2, abs=0.001)


def test_a_wait_before_the_first_operation_counts(tmp_path: Path) -> None:
    """The profiler's own span starts before the first operation, so a wait before it counts."""
    rows = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        time.sleep(0.2)
        rows @ rows
    recorded.export_chrome_trace(str(tmp_path / "one.json"))

    (trace,) = read_traces([tmp_path / "one.json"])
    result = profile_of(trace)

    assert result.parts.span_us > 200_000
    assert result.verdict.bottleneck == "data wait"


def test_several_ranks_have_a_row_each_and_one_sentence(tmp_path: Path) -> None:
    """The overall bottleneck is that of most ranks."""
    lost = [kernel(GEMM, 0, 2_000), kernel(SUM, 2_000, 8_000)]
    paths = [write(tmp_path / f"{rank}.json", lost, distributedInfo={"rank": rank}) for rank in range(2)]
    paths.append(write(tmp_path / "2.json", [kernel(GEMM, 0, 10_000)], distributedInfo={"rank": 2}))

    summary = as_json([profile_of(trace) for trace in read_traces(paths)])

    assert [(row["rank"], row["bottleneck"]) for row in summary["ranks"]] == [
        (0, "communication"),
        (1, "communication"),
        (2, "compute"),
    ]
    assert summary["bottleneck"] == "communication"
    assert summary["sentence"].startswith("On 2 of 3 ranks: Communication is the bottleneck, with 80% of the time")
    assert "span_us" not in summary
