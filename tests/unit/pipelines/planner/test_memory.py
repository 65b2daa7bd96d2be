"""Memory by component: sums that are published, and the rules of sharding."""

import pytest
import torch

from pipelines.planner.devices import parse_gpus
from pipelines.planner.layouts import why_not
from pipelines.planner.memory import kv_bytes_per_token, serving_memory, training_memory
from pipelines.planner.mesh import Layout
from pipelines.planner.shapes import shape_of
from services.llm.engine.config import KvKind
from services.llm.engine.kv.cache import KvCache
from tests.support.engine.attention_shapes import attention_shape
from tests.support.planned_models import LLAMA_2_7B, LLAMA_3_8B


def test_llama_3_8b_with_eight_contexts_of_8192_takes_26_7_gb() -> None:
    """Weights 16.06, keys and values 8.59, the framework 2: usually rounded to 28."""
    memory = serving_memory(LLAMA_3_8B, rows=8, length=8_192)

    assert {name: round(size / 1e9, 2) for name, size in memory.parts.items()} == {
        "weights": 16.06,
        "KV cache": 8.59,
        "framework": 2.0,
    }
    assert round(memory.total / 1e9, 1) == 26.7


def test_seven_billion_with_adam_are_27_gb_of_states_on_each_of_four() -> None:
    """16 bytes a parameter, of weights, gradients and two moments, which 24 GB do not hold."""
    memory = training_memory(LLAMA_2_7B, Layout(shard=4, checkpointing="full"), length=512)

    assert round(memory.states / 1e9, 1) == 27.0
    assert why_not(memory, parse_gpus("4xrtx4090")).startswith("its states (weights, gradients, Adam) take 27.0 GB")


@pytest.mark.parametrize("kind", ["model", "int8", "fp8"])
def test_a_tokens_keys_and_values_are_the_engines(kind: KvKind) -> None:
    """As many bytes as the pool itself has for a token."""
    config = attention_shape(4, 2, 16, layers=3)
    cache = KvCache(config, 2, 16, torch.bfloat16, torch.device("cpu"), kind)

    assert kv_bytes_per_token(shape_of(config, "x"), kind=kind) == cache.bytes_per_token


def test_int8_halves_the_matrices_alone() -> None:
    """The vocabulary's tables stay in bf16."""
    plain, packed = (
        serving_memory(LLAMA_3_8B, rows=0, length=1, weight_kind=kind).parts["weights"] for kind in ("model", "int8")
    )

    assert plain - packed == LLAMA_3_8B.num_layers * LLAMA_3_8B.layer_weights


def test_sharding_divides_the_states_and_nothing_that_a_row_keeps() -> None:
    """DDP holds everything on each GPU; FSDP2 a part, beside the layers that it gathered."""
    alone, shared = (training_memory(LLAMA_2_7B, layout, 2_048).parts for layout in (Layout(data=8), Layout(shard=8)))

    for name in ("weights", "gradients", "optimizer", "average"):
        assert shared[name] == pytest.approx(alone[name] / 8), name
    assert shared["activations"] > 0.5 * alone["activations"]
    assert "buffers" not in alone


def test_checkpointing_keeps_less_and_full_keeps_least() -> None:
    """Of activations; nothing else changes."""
    found = [
        training_memory(LLAMA_2_7B, Layout(shard=8, micro_batch=4, checkpointing=kept), 2_048)
        for kept in ("none", "selective", "full")
    ]
    activations = [memory.parts["activations"] for memory in found]

    assert activations == sorted(activations, reverse=True)
    assert activations[2] < 0.2 * activations[0]
    assert len({memory.total - kept for memory, kept in zip(found, activations, strict=True)}) == 1


def test_a_pipelines_first_stage_holds_a_micro_batch_for_each_stage() -> None:
    """1F1B: as many on their way as there are stages, of its own share of the layers."""
    whole = training_memory(LLAMA_2_7B, Layout(data=1), 2_048).parts["activations"]
    staged = training_memory(LLAMA_2_7B, Layout(pipeline=4, accumulation=16), 2_048).parts["activations"]
    short = training_memory(LLAMA_2_7B, Layout(pipeline=4, accumulation=1), 2_048).parts["activations"]

    assert staged == pytest.approx(whole, rel=0.02)
    assert short == pytest.approx(whole / 4, rel=0.05)


def test_tensor_parallelism_splits_the_inner_width_alone() -> None:
    """Heads and feed-forward rows are shared; the residual stream and the tables are on every GPU."""
    one, four = (training_memory(LLAMA_2_7B, Layout(tensor=size), 2_048).parts for size in (1, 4))
    matrices = LLAMA_2_7B.num_layers * LLAMA_2_7B.layer_weights

    assert one["weights"] - four["weights"] == pytest.approx(4 * matrices * 3 / 4)
    assert one["activations"] / 4 < four["activations"] < one["activations"]
