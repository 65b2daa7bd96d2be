"""The captured steps of one engine: all are warmed up, then all are captured, then the set is frozen.

A plan is cut into groups that run as captured shapes, and a rest: prompts, captured if they are short. Without a
warm-up a decode or beam shape is captured at its first use, and counted as late (prompts run eagerly). Beams that fit
no shape run eagerly, level by level, and are counted. Both counts stay 0 in a warmed-up engine whose requests ask for
no more items than beam rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.llm.engine.beam.search import RankedItems
from services.llm.engine.beam.trie import Trie
from services.llm.engine.config import EngineConfig
from services.llm.engine.forward.layers import LayerLoop
from services.llm.engine.forward.weights import DecoderWeights
from services.llm.engine.gpu.beam_graph import BeamGraph, BeamInputs
from services.llm.engine.gpu.graph_device import GraphDevice
from services.llm.engine.gpu.graph_shapes import (
    BeamShape,
    GraphGroup,
    GraphShape,
    GraphShapes,
    PromptShape,
    TextShape,
    is_text_decode,
)
from services.llm.engine.gpu.step_table import StepTable
from services.llm.engine.gpu.token_graphs import PromptGraph, PromptTable, TextGraph
from services.llm.engine.kv.block_table import BlockNeed
from services.llm.engine.plan import StepPlan
from services.llm.engine.sequence import Sequence as Text
from services.llm.engine.sequence import TextWork
from services.llm.engine.text.sampling import SampledBatch

CaptureProgress = Callable[[int, int], None]
"""(completed runs and captures of shapes, their total)."""


@dataclass(slots=True)
class GraphCounts:
    """Events that must not happen after the warm-up: late captures of shapes, and eager decode or beam steps."""

    late_captures: int = 0
    eager_fallbacks: int = 0


class StepGraphs:
    """Captures and runs the steps that have a shape."""

    def __init__(
        self,
        weights: DecoderWeights,
        config: EngineConfig,
        forward: LayerLoop,
        trie: Trie | None,
        device: GraphDevice,
    ) -> None:
        self.counts = GraphCounts()
        self._shapes = GraphShapes(config, trie.depth if trie is not None else 0)
        self._vocab_size = weights.config.vocab_size
        self._forward = forward
        self._trie = trie
        self._device = device
        self._captured: dict[GraphShape, TextGraph | BeamGraph | PromptGraph] = {}
        self._is_frozen = False
        longest = BlockNeed(config, weights.config.window_of_all).longest(weights.config.max_position_embeddings)
        self._table = StepTable(
            config.max_running, longest, config.block_tokens, config.num_blocks, weights.head_VD.device
        )
        prompt_rows = max((shape.num_rows for shape in self._shapes.all() if isinstance(shape, PromptShape)), default=0)
        self._prompts = PromptTable(
            prompt_rows, longest, config.block_tokens, config.num_blocks, forward.max_tile_rows, weights.head_VD.device
        )
        self._inputs = None
        if trie is not None:
            max_rows = max((shape.num_rows for shape in self._shapes.all() if isinstance(shape, BeamShape)), default=0)
            self._inputs = BeamInputs(weights.config, trie, max_rows, config.max_running, weights.head_VD.dtype)

    @torch.inference_mode()
    def warm_up(self, progress: CaptureProgress) -> None:
        """Run every shape once, so that every kernel is loaded, then capture every shape and freeze the set."""
        built = {shape: self._build(shape) for shape in self._shapes.all()}
        steps = [graph.step for graph in built.values()]
        for done, work in enumerate([*(step.warm_up for step in steps), *(step.capture for step in steps)], start=1):
            work()
            progress(done, 2 * len(steps))
        self._captured |= built
        self._is_frozen = True

    def cut(self, plan: StepPlan) -> tuple[StepPlan, list[GraphGroup]]:
        """Split a plan into the rest, which runs eagerly, and groups for `run_text` and `run_beams`."""
        rest, groups = self._shapes.cut(plan)
        self.counts.eager_fallbacks += sum(not sequence.adapter for sequence in rest.beam_steps)
        for group in groups:
            if group.shape not in self._captured:
                assert not self._is_frozen, "the warm-up captures every shape of a group"
                self.counts.late_captures += 1
                late = self._build(group.shape)
                late.step.warm_up()
                late.step.capture()
                self._captured[group.shape] = late
        return rest, groups

    def prompt_hidden(self, rest: StepPlan) -> Tensor | None:
        """Return the hidden states of the rest's rows, valid until the next replay; None if no captured shape fits."""
        shape = self._shapes.of_prompts(rest)
        graph = self._captured.get(shape) if shape is not None else None
        return graph.run(rest) if isinstance(graph, PromptGraph) else None

    def run_text(self, group: GraphGroup) -> SampledBatch:
        """Sample the next token of each request of a group. Does not wait."""
        graph = self._captured[group.shape]
        assert isinstance(graph, TextGraph), "not a text group"
        return graph.run(group.sequences)

    def run_beams(self, group: GraphGroup) -> list[RankedItems]:
        """Select all levels of each request of a group. Does not wait."""
        graph = self._captured[group.shape]
        assert isinstance(graph, BeamGraph), "not a beam group"
        return graph.run(group.sequences)

    def can_feed(self, plan: StepPlan) -> bool:
        """Whether the plan can start before the previous step's tokens are on the host.

        Requires that every text awaiting a token only decodes it, without an adapter.
        """
        return all(
            is_text_decode(chunk) and not chunk.sequence.adapter and not TextWork.of(chunk.sequence).needs_last_token
            for chunk in plan.chunks
            if chunk.sequence.num_pending
        )

    def keep(self, sampled: Sequence[tuple[list[Text], SampledBatch]]) -> None:
        """Keep a step's sampled tokens on the device for the next step."""
        self._table.keep([(sequences, batch.token_R) for sequences, batch in sampled])

    def _build(self, shape: GraphShape) -> TextGraph | BeamGraph | PromptGraph:
        if isinstance(shape, TextShape):
            return TextGraph(shape, self._forward, self._vocab_size, self._table, self._device)
        if isinstance(shape, PromptShape):
            return PromptGraph(shape, self._forward, self._prompts, self._device)
        assert self._trie is not None, "beams need a catalogue"
        assert self._inputs is not None, "beams need a catalogue"
        return BeamGraph(shape, self._forward, self._trie, self._table, self._inputs, self._device, self._vocab_size)
