"""The path from a file to terminal and written output, with arbitrary values in the trace."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.errors import InvalidRequest
from pipelines.profiler.report import RankProfile, as_json, as_lines, profile_of
from pipelines.profiler.timeline import as_html
from pipelines.profiler.trace import read_traces
from tests.support.profiler.traces import kernel, memcpy, operation, write

SHAPES = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
ON_GPU = [
    operation("aten::mm", 0, 30, **SHAPES, **{"External id": 5}),
    operation("cudaLaunchKernel", 10, 5, category="cuda_runtime", correlation=7),
    kernel("ampere_sgemm_128x64_nn", 20, 30, correlation=7, **{"External id": 5}),
    kernel("ncclDevKernel_AllReduce", 40, 30, stream=9),
    memcpy(2_000, 20),
    operation("step", 0, 2_100, category="user_annotation"),
    operation("train.py(1): main", 0, 2_100, category="python_function"),
]
ON_CPU = [one for one in ON_GPU if one["cat"] not in {"kernel", "gpu_memcpy"}] + [
    operation("aten::add", 1_900, 50, **SHAPES)
]
ABOUT = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA A100"}],
    "distributedInfo": {"rank": 0},
    "tailrace": {"dtype": "fp32", "flops_per_s": 1e12, "bytes_per_s": 1e10, "operations": {"aten::mm": [1e6, 1e5]}},
}
ODD = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=3),
    st.lists(st.integers(-2, 2), max_size=3), st.lists(st.lists(st.integers(-2, 9), max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(["id", "rank", "operations", "stream"]), st.integers(-1, 1), max_size=2),
)  # fmt: skip
CHANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.booleans(), ODD), min_size=1, max_size=12)


def profiles_or_refusal(path: Path) -> list[RankProfile] | str:
    """Return the profiles of a file, or the error message."""
    try:
        return [profile_of(one) for one in read_traces([path])]
    except InvalidRequest as refused:
        return str(refused)


@pytest.mark.parametrize("events", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
@given(changes=CHANGES, about=st.dictionaries(st.sampled_from(sorted(ABOUT)), ODD, max_size=2))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_whatever_stands_in_a_field_is_accounted_for_or_refused(tmp_path: Path, events, changes, about) -> None:
    """Either parts and fractions add up, or an error names the file."""
    changed = copy.deepcopy(events)
    for place, field, in_args, value in changes:
        one = changed[place % len(changed)]
        where = one["args"] if in_args and isinstance(one["args"], dict) and one["args"] else one
        where[sorted(where)[field % len(where)]] = value
    path = write(tmp_path / "odd.json", changed, **(ABOUT | about))

    profiles = profiles_or_refusal(path)

    if isinstance(profiles, str):
        assert "odd.json" in profiles
        return
    (row,) = json.loads(json.dumps(as_json(profiles)))["ranks"]
    parts = ("compute_us", "communication_exposed_us", "copy_exposed_us", "idle_us")
    assert sum(row[name] for name in parts) == pytest.approx(row["span_us"], rel=1e-6, abs=1e-6)
    assert sum(row["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert as_lines(profiles)[-1] == row["sentence"]
    assert as_html(profiles).startswith("<!doctype html>")
