"""A training step's memory by component against torch's tracker, which follows every tensor on fake tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _ModState
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.rope import periods
from pipelines.planner.memory import chunk_bytes, training_memory
from pipelines.planner.mesh import Checkpointing, ParallelLayout
from pipelines.planner.shapes import shape_of
from pipelines.scoring.dense import hidden_states
from pipelines.training.target.softmax import catalogue_loss
from tests.support.engine.attention_shapes import attention_shape


@dataclass(frozen=True, slots=True)
class Case:
    """A decoder, its batch's rows and tokens, and the checkpointing mode."""

    name: str
    config: DecoderConfig
    rows: int
    length: int
    checkpointing: Checkpointing = "none"
    is_bf16: bool = True


CPU = torch.device("cpu")
KINDS = {"weights": _MemRefType.PARAM, "gradients": _MemRefType.GRAD, "optimizer": _MemRefType.OPT}
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]


def decoder(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **others: Any) -> DecoderConfig:
    """Build a decoder config of these sizes whose heads share the hidden size."""
    head_dim, sizes = others.pop("head_dim", hidden // heads), {"vocab_size": vocab, "hidden_size": hidden}
    return attention_shape(
        heads, kv, head_dim, layers, intermediate_size=ffn, max_position_embeddings=8_192, **sizes, **others
    )


SMOL = decoder(30, 576, 9, 3, 1_536, 49_152)
QWEN = decoder(28, 1_024, 16, 8, 3_072, 151_936, head_dim=128, qk_norm=True)
LLAMA = decoder(32, 4_096, 32, 8, 14_336, 128_256, tie_word_embeddings=False)
CASES = (
    Case("ours", decoder(2, 64, 2, 2, 256, 1_700), 32, 200),
    Case("ours, checkpointed", decoder(3, 256, 4, 4, 1_024, 1_700), 16, 200, "full"),
    Case("ours in fp32", decoder(2, 64, 2, 2, 256, 1_700), 32, 200, is_bf16=False),
    Case("ours in fp32, checkpointed", decoder(3, 256, 4, 4, 1_024, 1_700), 16, 200, "full", is_bf16=False),
    Case("one long row, queries and keys normalised", decoder(2, 384, 6, 2, 1_024, 4_000, qk_norm=True), 1, 2_048),
    Case("SmolLM2-135M", SMOL, 1, 256),
    Case("SmolLM2-135M's first 10 layers, checkpointed", replace(SMOL, num_hidden_layers=10), 4, 256, "full"),
    Case("Qwen3-0.6B's first 6 layers", replace(QWEN, num_hidden_layers=6), 1, 512),
    Case("Llama-3-8B", LLAMA, 1, 512),
    Case("Llama-3-8B's first 6 layers, checkpointed", replace(LLAMA, num_hidden_layers=6), 1, 512, "full"),
)
QUICK = {
    "ours",
    "ours, checkpointed",
    "ours in fp32",
    "one long row, queries and keys normalised",
}


@dataclass(frozen=True, slots=True)
class Tracked:
    """A tracked training step: bytes by kind at the start of the backward pass and after the step."""

    model: Decoder
    tracker: MemTracker
    kept: dict[Any, int]
    after: dict[Any, int]

    def kept_by_last_layer(self) -> dict[Any, int]:
        """Return the bytes held after the last layer was recomputed, which is the peak."""
        (last,) = list(self.model.layers[-1].children())
        (kept,) = (snapshot[CPU] for snapshot in self.tracker.memory_tracking[last].snapshots[_ModState.POST_FW_AC])
        return kept


def tracked(case: Case, prepare: Callable[[Decoder], object], *, autocasts: bool = True) -> Tracked:
    """Track a step of a decoder after applying `prepare`."""
    periods.cache_clear()  # cached tensors are real and do not mix with fake tensors
    tracker = MemTracker()
    with FakeTensorMode():
        model = Decoder(case.config)
        prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens_BL = torch.zeros(case.rows, case.length, dtype=torch.long)
        tracker.track_external(model, optimizer, tokens_BL)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                hidden_TD = hidden_states(model, tokens_BL)
                loss = catalogue_loss(hidden_TD, model.head_weight_VD, tokens_BL.flatten())
            del hidden_TD
            kept = tracker.get_tracker_snapshot("current")[CPU]
            loss.backward()
            optimizer.step()
            after = tracker.get_tracker_snapshot("current")[CPU]
    periods.cache_clear()
    return Tracked(model, tracker, kept, after)


def as_it_is(_model: Decoder) -> None:
    """Leave the decoder unchanged."""


def checkpoint(model: Decoder, **how: Any) -> None:
    model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer, **how) for layer in model.layers)


def planned(case: Case) -> tuple[dict[str, float], float]:
    """Return the planner's sizes without fused norms, with activations only, and the additional kept bytes.

    The additional bytes are copies of weights and the loss. While a layer is recomputed, the loss and the other layers'
    copies have been freed.
    """
    layout = ParallelLayout(micro_batch=case.rows, checkpointing=case.checkpointing)
    shape = shape_of(case.config, case.name)
    parts = training_memory(shape, layout, case.length, is_bf16=case.is_bf16, fuses_norms=False).parts
    copies, loss = parts.get("working weights", 0.0), parts["loss"] - chunk_bytes(shape)
    beside = copies / shape.num_layers if case.checkpointing == "full" else copies + loss
    return {name: parts[name] for name in ("weights", "gradients", "optimizer", "activations")}, beside


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.grid) for case in CASES],
)
def test_each_component_is_the_trackers_within_a_tenth(case: Case) -> None:
    """Weights, gradients, Adam's moments and activations are within a tenth of the tracker's."""
    is_whole = case.checkpointing == "none"
    step, (sizes, beside) = tracked(case, as_it_is if is_whole else checkpoint, autocasts=case.is_bf16), planned(case)
    measured = {name: step.after[kind] for name, kind in KINDS.items()}
    measured["activations"] = (step.kept if is_whole else step.kept_by_last_layer())[_MemRefType.ACT] - beside

    ratios = {name: sizes[name] / measured[name] for name in measured}

    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), ratios


def kept_selectively(layers: int) -> tuple[float, float]:
    """Return the bytes kept with selective checkpointing, by the tracker and by the planner."""
    case = Case("selective", decoder(layers, 128, 4, 2, 512, 1_700), 8, 200)
    keeping = partial(create_selective_checkpoint_contexts, PRODUCTS)
    step = tracked(case, partial(checkpoint, context_fn=keeping))
    layout = ParallelLayout(micro_batch=case.rows, checkpointing="selective")
    parts = training_memory(shape_of(case.config, "x"), layout, case.length, fuses_norms=False).parts
    return float(step.kept[_MemRefType.ACT]), parts["activations"]


def test_a_layer_checkpointed_selectively_keeps_what_the_tracker_finds() -> None:
    """The additional bytes of two more layers agree within a tenth."""
    (few, planned_few), (more, planned_more) = kept_selectively(2), kept_selectively(4)

    assert planned_more - planned_few == pytest.approx(more - few, rel=0.1)


@pytest.fixture
def four_gpus() -> Iterator[DeviceMesh]:
    """A mesh of four ranks on a fake process group."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_sharded_components_are_the_trackers_within_a_tenth(four_gpus: DeviceMesh) -> None:
    """FSDP2 over four ranks holds a quarter of the states, and activations without weight copies."""
    case = Case("ours, sharded", decoder(3, 256, 4, 4, 1_024, 1_700), 16, 200)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def shard(model: Decoder) -> None:
        for part in (*model.layers, model):
            fully_shard(part, mesh=four_gpus, mp_policy=policy)

    step, shape = tracked(case, shard, autocasts=False), shape_of(case.config, case.name)
    parts = training_memory(shape, ParallelLayout(shard=4, micro_batch=case.rows), case.length, fuses_norms=False).parts

    assert {name: parts[name] for name in KINDS} == {
        name: pytest.approx(step.after[kind], rel=0.1) for name, kind in KINDS.items()
    }
    kept = step.kept[_MemRefType.ACT] - parts["loss"] + chunk_bytes(shape)
    assert parts["activations"] == pytest.approx(kept, rel=0.1)
