"""Carries a step out on one device: what is recorded there by replaying it, the rest as it comes.

It decides nothing and keeps no requests; the KV cache is its own. A step is submitted without waiting for the device, and
collected later.
"""

import torch

from models.decoder.decoder import Decoder
from services.llm.engine.beam.search import Ranker, Ranking
from services.llm.engine.beam.trie import Trie
from services.llm.engine.config import EngineConfig
from services.llm.engine.cpu.choice import cpu_forward
from services.llm.engine.forward.eager_steps import EagerSteps
from services.llm.engine.forward.layers import Forward, LayerLoop
from services.llm.engine.forward.running_step import RunningStep, Tokens
from services.llm.engine.forward.weights import Weights, join_weights
from services.llm.engine.gpu.graph_device import CudaGraphDevice, GraphDevice
from services.llm.engine.gpu.graph_shapes import TextShape
from services.llm.engine.gpu.graphs import GraphCounts, Progress, StepGraphs
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.schedule.plan import StepPlan


class Runner:
    """The forward pass over its KV cache and, where there is a catalogue, the choice among items, on one device."""

    def __init__(
        self, decoder: Decoder, config: EngineConfig, trie: Trie | None, graph_device: GraphDevice | None = None
    ) -> None:
        weights = join_weights(decoder)
        device = weights.head_VD.device
        forward = _forward_for(weights, config)
        ranker = Ranker(decoder.config, forward.logits, trie) if trie is not None else None
        self._eager = EagerSteps(forward, ranker, decoder.config.vocab_size, config.block_tokens, device)
        self._graphs = None
        graph_device = graph_device or _graph_device_for(device, config)
        if graph_device is not None and isinstance(forward, LayerLoop):
            self._graphs = StepGraphs(weights, config, forward, trie, graph_device)

    @property
    def graph_counts(self) -> GraphCounts:
        """What should have stayed 0 since the warm-up."""
        return self._graphs.counts if self._graphs is not None else GraphCounts()

    def warm_up(self, progress: Progress) -> None:
        """Record every decode and beam shape, where the device can."""
        if self._graphs is not None:
            self._graphs.warm_up(progress)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> RunningStep:
        """Start one step that is not empty. Does not wait for it."""
        if self._graphs is None:
            return RunningStep(*self._eager.run(plan))
        return RunningStep(*self._replay(plan, self._graphs))

    def _replay(self, plan: StepPlan, graphs: StepGraphs) -> tuple[list[Ranking], Tokens]:
        """Start what is recorded first: while the device runs it, the host launches the rest, kernel by kernel."""
        rest, groups = graphs.cut(plan)
        rankings: list[Ranking] = []
        drawn: Tokens = []
        for group in groups:
            if isinstance(group.shape, TextShape):
                drawn.append((group.sequences, graphs.run_text(group)))
            else:
                rankings += graphs.run_beams(group)
        if rest.is_empty:
            return rankings, drawn
        ranked, texts = self._eager.run(rest)
        return rankings + ranked, drawn + texts


def _forward_for(weights: Weights, config: EngineConfig) -> Forward:
    cache = KvCache(
        weights.config,
        config.num_blocks + 1,
        config.block_tokens,
        weights.head_VD.dtype,
        weights.head_VD.device,
        config.kv_kind,
    )  # the last block is nobody's: rows that only pad are written there, and stand where a window has passed
    if weights.head_VD.device.type != "cuda":
        return cpu_forward(weights, cache, config)
    from services.llm.engine.gpu.forward import triton_forward  # Triton is not installed everywhere

    return triton_forward(weights, cache)


def _graph_device_for(device: torch.device, config: EngineConfig) -> GraphDevice | None:
    return CudaGraphDevice() if device.type == "cuda" and config.uses_graphs else None
