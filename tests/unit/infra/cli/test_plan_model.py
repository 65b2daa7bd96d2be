"""`tailrace plan model`: from a config and a number of GPUs to layouts, serving and cost."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.unit.infra.cli.conftest import Run

CONFIG = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8_192,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with the config of Llama-3-8B, without weights."""
    folder = tmp_path / "llama-3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture
def plan(tailrace: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "300")
    return partial(tailrace, "plan", "model")


def test_a_plan_prints_every_part(plan: Run, model: str) -> None:
    """A plan shows memory, three layouts, collectives, bubble, rooflines, cost, and replicas versus shards."""
    planned = plan(
        model, "--gpus", "8xh100", "--batch", "64", "--length", "4096", "--beams", "8", "--price-per-gpu-hour", "3"
    )

    assert planned.code == 0
    for words in (
        "llama-3-8b: 8.03 B parameters",
        "1  FSDP2 8",
        "\n3  ",
        "weights  gradients  optimizer  average",
        "activations by checkpointing, GB: none ",
        "collective all-gather of weights (FSDP): 112.42 GB a step over NVLink 4",
        "bubble ",
        "roofline   training step: bound by compute",
        "roofline   prefill of 1,024 tokens: bound by compute",
        "roofline   decode of",
        "roofline   beams, 8 at a time: bound by memory",
        "at 3 a GPU and hour",
        "DDP only does not fit: its states (weights, gradients, Adam) take 128.5 GB",
        "Replicas win",
    ):
        assert words in planned.out, words


def test_training_or_serving_alone(plan: Run, model: str) -> None:
    """`--train` and `--serve` print only their own part."""
    training, serving = plan(model, "--train").out, plan(model, "--serve").out

    assert ("TRAINING" in training, "SERVING" in training) == (True, False)
    assert ("TRAINING" in serving, "SERVING" in serving) == (False, True)


def test_what_does_not_fit_is_said_and_is_no_error(plan: Run, model: str) -> None:
    """A model that does not fit is reported with exit code 0."""
    planned = plan(model, "--gpus", "4x4090", "--train")

    assert planned.code == 0
    assert "does not fit: FSDP2 4: its states (weights, gradients, Adam) take 32.1 GB" in planned.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "8xh1000"), "--gpus: unknown device 'h1000'; give h100"),
        (("--kv", "int4"), "--kv: 'int4' is unknown; give model, int8 or fp8"),
        (("--batch", "-1"), "--batch: -1"),
        (("--batch", "1000000000"), "--batch: 1000000000"),
        (("--length", "0"), "--length: 0"),
        (("--parameters", "1e6"), "MODEL: "),
        (("--activation-mb", "10"), "--activation-mb: "),
        (("--rate", "0"), "--rate: 0"),
        (("--rate", "1e6"), "--rate: 1e+06"),
        (("--price-per-gpu-hour", "-3"), "--price-per-gpu-hour: -3"),
        (("--price-per-gpu-hour", "nan"), "--price-per-gpu-hour: nan"),
        (("--layout", "tp8,pp2"), "--layout: "),
        (("--dtype", "int4"), "--dtype: "),
        (("--gpus", "8xa100", "--dtype", "fp8"), "--dtype: a100-80 has no products in fp8"),
        (("--virtual-stages", "0"), "--virtual-stages: 0"),
        (("--train", "--rate", "3"), "--rate: "),
        (("--train", "--kv", "fp8"), "--kv: "),
        (("--serve", "--layout", "dp8"), "--layout: "),
        (("--serve", "--async-tp"), "--async-tp: "),
        (("--serve", "--length", "64"), "--length: "),
        (("--gpus", "8xh100", "--layout", "dp8", "--vocab-parallel"), "--vocab-parallel: "),
        (("--gpus", "8xh100", "--layout", "dp8", "--virtual-stages", "2"), "--virtual-stages: "),
    ],
)  # fmt: skip
def test_a_wrong_or_unused_option_is_named(plan: Run, model: str, arguments: tuple[str, ...], words: str) -> None:
    """The error is one line with the valid values, also for an option that this plan does not use."""
    planned = plan(model, *arguments)

    assert planned.code == 1
    assert words in planned.err
    assert "; " in planned.err
    assert "Traceback" not in planned.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpus", "8xh200"),
        ("--train",),
        ("--serve",),
        ("--batch", "128"),
        ("--length", "1024"),
        ("--layout", "tp2,fsdp4"),
        ("--dtype", "fp8"),
        ("--sequence-parallel",),
        ("--vocab-parallel",),
        ("--async-tp",),
        ("--keep-gathered",),
        ("--virtual-stages", "2"),
        ("--rate", "20"),
        ("--prompt", "2048"),
        ("--output", "64"),
        ("--beams", "4"),
        ("--kv", "fp8"),
        ("--price-per-gpu-hour", "2"),
    ],
)
def test_every_option_changes_the_plan(plan: Run, model: str, arguments: tuple[str, ...]) -> None:
    """Each accepted option affects the plan."""
    plain, changed = plan(model, "--gpus", "8xh100"), plan(model, "--gpus", "8xh100", *arguments)

    assert changed.code == 0, changed.err
    assert plain.out != changed.out


def test_options_of_decoders_are_refused_for_another_model(plan: Run) -> None:
    """Each option for other models changes the plan, and decoder options are rejected."""
    sizes = ("--parameters", "25.6e6", "--flops", "8.2e9", "--gpus", "4xa100")
    plain = plan(*sizes).out

    assert plan(*sizes, "--activation-mb", "90").out != plain
    assert plan(*sizes, "--layout", "fsdp4").out != plain
    for option in (("--length", "64"), ("--rate", "3"), ("--async-tp",), ("--layout", "tp4"), ("--serve",)):
        refused = plan(*sizes, *option)

        assert refused.code == 1, option
        assert option[0] in refused.err


def test_what_differs_from_a_dense_decoder_is_said(plan: Run, model: str) -> None:
    """The plan states quantized storage, attention windows, active experts, and unread config keys."""
    path = Path(model) / "config.json"
    changes = {
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 4_096,
        "quantization_config": {"quant_method": "fp8"},
        "extra_rank": 4,
    }
    path.write_text(json.dumps(CONFIG | changes))

    out = plan(model, "--gpus", "8xh100").out

    for words in ("48.54 GB stored (fp8)", "active a token", "window of 4,096 tokens in 32 layers", "extra_rank"):
        assert words in out, words
