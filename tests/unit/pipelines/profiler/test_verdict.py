"""The summary sentence from time fractions, and bottlenecks planted in plain torch in a separate process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.profiler.report import profile_of
from pipelines.profiler.shares import Shares
from pipelines.profiler.trace import read_traces
from pipelines.profiler.verdict import Bottleneck, Circumstances, common_verdict, verdict_of
from tests.support.profiler.traces import kernel, write

ROOT = Path(__file__).resolve().parents[4]
ABOUT = Circumstances(is_of_gpu=True, interrupted=0.0, is_unrecorded=False, dtype="fp32", operations=())
PARTS = ("compute", "memory", "communication_exposed", "communication_hidden", "copy", "launch", "data_wait", "host")


def shares(**given: float) -> Shares:
    """Build fractions; the rest is compute that hides communication, which needs no fix."""
    return Shares(**{**dict.fromkeys(PARTS, 0.0), "communication_hidden": 1 - sum(given.values()), **given})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"compute": 0.95}, Bottleneck.COMPUTE),
        ({"memory": 0.9}, Bottleneck.MEMORY),
        ({"compute": 0.6, "memory": 0.4}, Bottleneck.NONE),
        ({"compute": 0.6, "communication_exposed": 0.4}, Bottleneck.COMMUNICATION),
        ({"compute": 0.6, "data_wait": 0.3, "launch": 0.1}, Bottleneck.DATA_WAIT),
        ({"launch": 0.7, "data_wait": 0.3}, Bottleneck.LAUNCH),
        ({"copy": 0.5, "compute": 0.5}, Bottleneck.COPY),
        ({"host": 0.5, "compute": 0.5}, Bottleneck.HOST),
        (
            {"compute": 0.5, "memory": 0.15, "data_wait": 0.15, "communication_exposed": 0.1, "launch": 0.1},
            Bottleneck.NONE,
        ),
    ],
)
def test_the_largest_loss_is_named_before_what_computes(given: dict[str, float], expected: Bottleneck) -> None:
    """Device-bound work is named only if one kind of work takes nearly all of the time."""
    verdict = verdict_of(shares(**given), ABOUT)

    assert verdict.bottleneck is expected
    assert ". " not in verdict.sentence
    assert verdict.sentence.endswith(".")
    assert ("No bottleneck" in verdict.sentence) == (expected is Bottleneck.NONE)
    assert ("first" in verdict.sentence) == (expected is not Bottleneck.NONE)


def test_what_nothing_explains_is_named_later_and_hides_no_other() -> None:
    """Unexplained gaps may come from other programs, so they have a higher threshold."""
    about = replace(ABOUT, is_unrecorded=True)

    assert verdict_of(shares(compute=0.8, data_wait=0.2), about).bottleneck is Bottleneck.COMPUTE
    assert verdict_of(shares(compute=0.6, data_wait=0.4), about).bottleneck is Bottleneck.DATA_WAIT
    assert verdict_of(shares(compute=0.8, data_wait=0.2), ABOUT).bottleneck is Bottleneck.DATA_WAIT


def test_interruptions_take_no_part() -> None:
    """Interruptions are excluded: a launch-bound step on a busy processor is still launch-bound."""
    about = replace(ABOUT, interrupted=0.6)

    assert verdict_of(shares(launch=0.35, host=0.65), about).bottleneck is Bottleneck.LAUNCH


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"communication_exposed": 0.24, "launch": 0.35, "compute": 0.41}, Bottleneck.LAUNCH),
        ({"communication_exposed": 0.24, "data_wait": 0.19, "copy": 0.1, "compute": 0.47}, Bottleneck.COMMUNICATION),
        ({"communication_exposed": 0.2, "launch": 0.2, "compute": 0.6}, Bottleneck.NONE),
    ],
)
def test_half_of_the_time_lost_in_several_ways_is_named(given: dict[str, float], expected: Bottleneck) -> None:
    """Losses are summed before they are compared with thresholds, and the two largest are named."""
    verdict = verdict_of(shares(**given), ABOUT)

    assert verdict.bottleneck is expected
    assert ("in several ways" in verdict.sentence) == (expected is not Bottleneck.NONE)


@pytest.mark.parametrize(
    ("about", "is_enough"),
    [
        ({"num_activities": 2, "active_us": 6.0, "span_us": 7.0, "recorded_us": 1e6}, False),
        ({"num_activities": 60, "active_us": 900.0, "span_us": 2_000.0, "recorded_us": 1e6}, False),
        ({"num_activities": 60, "active_us": 900.0, "span_us": 2_000.0, "recorded_us": 9e3}, True),
        ({"num_activities": 2, "active_us": 6_000.0, "span_us": 7_000.0, "recorded_us": 1e4}, True),
        ({"lacks_kernels": True, "is_of_gpu": False}, False),
        ({"unknown": 0.6}, False),
    ],
)
def test_too_little_evidence_is_no_verdict(about: dict[str, Any], is_enough: bool) -> None:
    """With few tiny kernels, missing kernels or unknown kernels, the sentence states the missing evidence."""
    verdict = verdict_of(shares(memory=0.9), replace(ABOUT, **about))

    assert verdict.bottleneck is (Bottleneck.MEMORY if is_enough else Bottleneck.UNKNOWN)
    assert common_verdict([verdict, verdict_of(shares(memory=0.9), ABOUT)]).bottleneck is Bottleneck.MEMORY


@pytest.mark.parametrize("kind", ["compute", "memory"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8", None])
def test_advice_invents_no_dtype(kind: str, dtype: str | None) -> None:
    """bf16 is advised only if the trace shows fp32."""
    verdict = verdict_of(shares(**{kind: 0.95}), replace(ABOUT, dtype=dtype))

    assert ("bf16" in verdict.sentence) == (dtype == "fp32")


def test_cards_without_bf16_get_another_advice(tmp_path: Path) -> None:
    """The advised dtype is fp16 on V100 and T4, bf16 on A100."""
    for name, half in (("Tesla V100-SXM2-32GB", "fp16"), ("Tesla T4", "fp16"), ("NVIDIA A100-SXM4-80GB", "bf16")):
        about = {"deviceProperties": [{"id": 0, "name": name}]}

        (trace,) = read_traces([write(tmp_path / "one.json", [kernel("ampere_sgemm_128x64_nn", 0, 9_000)], **about)])

        assert f"compute in {half} first" in profile_of(trace).verdict.sentence


@pytest.mark.parametrize(
    ("copies", "advice"), [("HtoD", "pinned"), ("DtoH", "results"), ("DtoD", "clones"), ("", "pinned")]
)
def test_advice_of_copies_is_of_their_direction(copies: str, advice: str) -> None:
    """The advice depends on the copy direction: pinned memory does not help copies within a device."""
    assert advice in verdict_of(shares(copy=0.5), replace(ABOUT, copies=copies)).sentence


PLANTS = {
    "compute": "steps",
    "memory": "shapes",
    "launch": "plain",
    "data wait": "stack",
    "communication": "steps",
    "none": "plain",
}
"""Recording style by kind."""
RECORD = (
    "import json, sys; from tests.support.profiler import plants; [plants.main(each) for each in json.load(sys.stdin)]"
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recording of each kind, made in one other process; collectives in two more."""
    root = tmp_path_factory.mktemp("plants")
    commands = []
    for kind, style in PLANTS.items():
        (root / kind).mkdir()
        commands.append([kind, str(root / kind), "--styles", style])
    words = json.dumps(commands)
    subprocess.run([sys.executable, "-c", RECORD], cwd=ROOT, input=words, check=True, timeout=240, text=True)
    return root


@pytest.mark.parametrize("kind", PLANTS)
def test_a_plant_is_named(planted: Path, kind: str) -> None:
    """A planted bottleneck of each kind is named."""
    profile = profile_of(read_traces([planted / kind / f"{PLANTS[kind]}.json"])[0])

    assert profile.verdict.bottleneck == kind, profile.shares
    assert sum(share for _, share in profile.shares.items()) == pytest.approx(1)
