"""The components of a training step's memory against torch's own tracker, which follows every tensor of the step on fake tensors."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils.checkpoint import checkpoint

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder, DecoderLayer
from models.decoder.rope import periods
from pipelines.planner.memory import Memory, training_memory
from pipelines.planner.mesh import Checkpointing, Layout
from pipelines.planner.shapes import shape_of
from pipelines.scoring.dense import hidden_states
from pipelines.training.target.softmax import catalogue_loss


@dataclass(frozen=True, slots=True)
class Case:
    """A decoder, the rows and tokens of its batch, and what the forward pass keeps."""

    name: str
    config: DecoderConfig
    rows: int
    length: int
    checkpointing: Checkpointing = "none"


def decoder(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **others: Any) -> DecoderConfig:
    """A decoder of these sizes whose heads share the hidden size."""
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=others.pop("head_dim", hidden // heads),
        max_position_embeddings=8_192,
        **others,
    )


SMOL = decoder(30, 576, 9, 3, 1_536, 49_152)
LLAMA = decoder(32, 4_096, 32, 8, 14_336, 128_256, tie_word_embeddings=False)
CASES = (
    Case("ours", decoder(4, 256, 4, 4, 1_024, 3_000), 64, 200),
    Case("ours, checkpointed", decoder(8, 512, 8, 8, 2_048, 3_000), 64, 200, "full"),
    Case("one long row", decoder(6, 384, 6, 2, 1_024, 8_000), 1, 4_096),
    Case("SmolLM2-135M", SMOL, 4, 512),
    Case("SmolLM2-135M, checkpointed", SMOL, 8, 512, "full"),
    Case("Qwen3-0.6B", decoder(28, 1_024, 16, 8, 3_072, 151_936, head_dim=128, qk_norm=True), 2, 512),
    Case("Llama-3-8B", LLAMA, 1, 1_024),
    Case("Llama-3-8B, checkpointed", LLAMA, 2, 1_024, "full"),
)
QUICK = {"ours", "ours, checkpointed", "one long row", "SmolLM2-135M"}


class Checkpointed(DecoderLayer):
    """A layer that keeps its input alone."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        """Compute the layer, and again in the backward pass."""
        result: torch.Tensor = checkpoint(super().forward, *inputs, use_reentrant=False)
        return result


def tracked(case: Case) -> dict[str, float]:
    """Bytes by component of the second of two steps of training: states after it, activations at their largest."""
    periods.cache_clear()  # of real tensors, which do not mix with fake ones
    tracker = MemTracker()
    with FakeTensorMode():
        model = Decoder(case.config)
        if case.checkpointing == "full":
            for layer in model.layers:
                layer.__class__ = Checkpointed
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens_BL = torch.zeros(case.rows, case.length, dtype=torch.long)
        tracker.track_external(model, optimizer, tokens_BL)
        with tracker:
            for _ in range(2):
                optimizer.zero_grad()
                tracker.reset_mod_stats()
                with torch.autocast("cpu", torch.bfloat16):
                    hidden_TD = hidden_states(model, tokens_BL)
                    loss = catalogue_loss(hidden_TD, model.head_weight_VD, tokens_BL.flatten())
                del hidden_TD
                kept = tracker.get_tracker_snapshot("current")
                loss.backward()
                after = tracker.get_tracker_snapshot("current")
                optimizer.step()
    periods.cache_clear()
    device = torch.device("cpu")
    parts = {
        "weights": after[device][_MemRefType.PARAM],
        "gradients": after[device][_MemRefType.GRAD],
        "optimizer": after[device][_MemRefType.OPT],
        "activations": kept[device][_MemRefType.ACT],
    }
    return {name: float(size) for name, size in parts.items()}


def planned(case: Case) -> Memory:
    """The same step by the planner, on a device that does not fuse norms."""
    layout = Layout(micro_batch=case.rows, checkpointing=case.checkpointing)
    return training_memory(shape_of(case.config, case.name), layout, case.length, fuses_norms=False)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.grid) for case in CASES],
)
def test_each_component_is_the_trackers_within_a_tenth(case: Case) -> None:
    """Weights, gradients, Adam's moments, and all that the forward pass keeps: activations, copies of weights and the loss's part."""
    found, memory = tracked(case), planned(case)
    kept = memory.parts["activations"] + memory.parts["working weights"] + memory.parts["loss"]

    ratios = {name: memory.parts[name] / found[name] for name in ("weights", "gradients", "optimizer")}
    ratios["activations"] = kept / found["activations"]

    assert all(0.9 <= ratio <= 1.1 for ratio in ratios.values()), ratios
