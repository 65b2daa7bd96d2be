"""The cases of the engine's benchmark: amounts, prompts, and the published workload."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.engine.cases import Case, code_table, draw_prompts, shape_cases, text_cases

BARE = {"ray", "rich", "typer", "transformers", "prometheus_client", "pydantic", "pyarrow", "fastapi", "psutil"}


def test_the_published_workload() -> None:
    """nano-vllm's 256 sequences generate 133,966 tokens, as published on its page."""
    case = next(case for group in shape_cases() for case in group.cases if case.name == "nano-vllm-256")

    assert (case.batch, case.amount) == (256, 133_966)
    assert {min(case.prompt_lens) >= 100, max(case.prompt_lens) <= 1_024} == {True}


def test_a_value_is_the_amount_by_time() -> None:
    """The amount is generated tokens, prompt tokens or requests; in milliseconds it is the time itself."""
    values = {case.name: case.value(2.0) for case in text_cases()}

    assert values["decode-8"] == 8 * 64 / 2
    assert values["prefill-16x512"] == 16 * 512 / 2
    assert values["beams-32"] == 0.5
    assert Case(name="c", unit="ms", batch=4, prompt_len=1, width=2).value(0.25) == 250.0


@pytest.mark.parametrize("words", [range(50), list(range(1_000))])
def test_prompts_depend_on_case_and_run_alone(words: range | list[int]) -> None:
    """Every engine gets the same prompts in a run, and other ones in the next run."""
    case = text_cases()[1]

    first, again, other = (draw_prompts(case, words, run) for run in (0, 0, 1))

    assert [len(prompt) for prompt in first] == case.prompt_lens
    assert first == again
    assert first != other


@pytest.mark.parametrize("vocab_size", [400, 49_152])
def test_the_catalogue_lies_in_the_vocabulary(vocab_size: int) -> None:
    """Codes are distinct, and the levels' tokens are disjoint, the last ones of the vocabulary."""
    table = code_table(vocab_size)

    assert len(np.unique(table.codes, axis=0)) == len(table.codes)
    assert table.codes.max() < table.level_size
    assert np.diff(table.token_offsets).tolist() == [table.level_size] * 2
    assert table.token_offsets[-1] + table.level_size == vocab_size


def test_the_benchmark_imports_little() -> None:
    """The command and our engine's process import only torch, numpy, safetensors and tokenizers."""
    script = (
        "import sys, benchmarks.engine, benchmarks.engine.tailrace; "
        f"sys.exit(', '.join({BARE!r} & set(sys.modules)) or 0)"
    )

    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
