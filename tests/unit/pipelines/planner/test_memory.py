"""Memory by component: published totals, and the rules of sharding."""

import pytest
import torch

from pipelines.planner.memory import kv_bytes_per_token, serving_memory, training_memory
from pipelines.planner.mesh import ParallelLayout
from pipelines.planner.shapes import shape_of
from services.llm.engine.config import KvKind
from services.llm.engine.kv.cache import KvCache
from tests.support.engine.attention_shapes import attention_shape
from tests.support.planned_models import LLAMA_2_7B, LLAMA_3_8B


def test_llama_3_8b_with_eight_contexts_of_8192_takes_26_7_gb() -> None:
    """Weights take 16.06 GB, keys and values 8.59 GB, the framework 2 GB: usually rounded to 28 GB."""
    memory = serving_memory(LLAMA_3_8B, rows=8, length=8_192)

    assert {name: round(size / 1e9, 2) for name, size in memory.parts.items()} == {
        "weights": 16.06,
        "KV cache": 8.59,
        "framework": 2.0,
    }
    assert round(memory.total / 1e9, 1) == 26.7


@pytest.mark.parametrize("kind", ["model", "int8", "fp8"])
def test_a_tokens_keys_and_values_are_the_engines(kind: KvKind) -> None:
    """Bytes per token equal the engine's KV pool."""
    config = attention_shape(4, 2, 16, layers=3)
    cache = KvCache(config, 2, 16, torch.bfloat16, torch.device("cpu"), kind)

    assert kv_bytes_per_token(shape_of(config, "x"), kind) == cache.bytes_per_token


def test_int8_halves_the_matrices_alone() -> None:
    """int8 applies only to the layers' matrices; the vocabulary tables stay in bf16."""
    plain, packed = (
        serving_memory(LLAMA_3_8B, rows=0, length=1, weight_kind=kind).parts["weights"] for kind in ("model", "int8")
    )

    assert plain - packed == LLAMA_3_8B.num_layers * LLAMA_3_8B.layer_weights


def test_a_pipelines_first_stage_holds_a_micro_batch_for_each_stage() -> None:
    """1F1B keeps a micro-batch per stage in flight, each with the stage's fraction of the layers."""
    whole = training_memory(LLAMA_2_7B, ParallelLayout(data=1), 2_048).parts["activations"]
    staged = training_memory(LLAMA_2_7B, ParallelLayout(pipeline=4, accumulation=16), 2_048).parts["activations"]
    short = training_memory(LLAMA_2_7B, ParallelLayout(pipeline=4, accumulation=1), 2_048).parts["activations"]

    assert staged == pytest.approx(whole, rel=0.02)
    assert short == pytest.approx(whole / 4, rel=0.05)


def test_tensor_parallelism_splits_the_inner_width_alone() -> None:
    """Heads and feed-forward rows are sharded; the residual stream and the tables are on every GPU."""
    one, four = (training_memory(LLAMA_2_7B, ParallelLayout(tensor=size), 2_048).parts for size in (1, 4))
    matrices = LLAMA_2_7B.num_layers * LLAMA_2_7B.layer_weights

    assert one["weights"] - four["weights"] == pytest.approx(4 * matrices * 3 / 4)
    assert one["activations"] / 4 < four["activations"] < one["activations"]
