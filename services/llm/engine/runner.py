"""Runs a step on one device: graphs replay the captured parts, the rest is launched eagerly.

The rows of a step are the chunks' tokens, then the beams, in plan order. The runner decides nothing and keeps no
requests. A step is submitted without waiting for the device, and its result is collected later.

Shape suffixes: T rows of the step, P rows that go to the paged cache, D hidden, R requests, V vocabulary.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.decoder.decoder import Decoder
from services.llm.engine.beam.search import BeamBatch, BeamSearch, RankedItems
from services.llm.engine.beam.trie import Trie
from services.llm.engine.config import EngineConfig
from services.llm.engine.cpu.forward import cpu_forward
from services.llm.engine.device import HostCopy, to_device
from services.llm.engine.forward.adapters import StepAdaptersCache
from services.llm.engine.forward.layers import Forward, LayerLoop, StepInputs
from services.llm.engine.forward.weights import DecoderWeights, join_weights
from services.llm.engine.gpu.graph_device import CudaGraphDevice, GraphDevice
from services.llm.engine.gpu.graph_shapes import TextShape
from services.llm.engine.gpu.graphs import CaptureProgress, GraphCounts, StepGraphs
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.ranks import EngineRanks, LeadRank
from services.llm.engine.sampling_parameters import SampledToken
from services.llm.engine.sequence import Sequence
from services.llm.engine.text.sampling import SampledBatch, SamplingInput, sample

SampledTokens = list[tuple[list[Sequence], SampledBatch]]
"""Text sequences, once for each of their rows, and the token that was sampled for each row."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: the rankings that it completed, and new tokens for each text whose last chunk ran.

    A text has a token after its last token and after each of its drafts.
    """

    rankings: list[tuple[Sequence, np.ndarray, np.ndarray]]
    tokens: dict[Sequence, list[SampledToken]]


class RunningStep:
    """A submitted step, whose results are being copied to the host."""

    def __init__(self, rankings: list[RankedItems], sampled: SampledTokens) -> None:
        self._sampled = sampled
        self._rankings = rankings
        columns = [[ranking.item_W for ranking in rankings], [ranking.score_W for ranking in rankings]]
        self._ranked = HostCopy([torch.cat(column) for column in columns] if rankings else [])

    def collect(self) -> StepResult:
        """Wait for the device and return the result."""
        tokens: dict[Sequence, list[SampledToken]] = defaultdict(list)
        for sequences, drawn in self._sampled:
            for sequence, token in zip(sequences, drawn.tokens(), strict=True):
                tokens[sequence].append(token)
        return StepResult(self._collect_rankings() if self._rankings else [], tokens)

    def _collect_rankings(self) -> list[tuple[Sequence, np.ndarray, np.ndarray]]:
        items, scores = self._ranked.arrays()
        ends = np.cumsum([len(ranking.item_W) for ranking in self._rankings])[:-1]
        rankings = []
        for ranking, item, score in zip(self._rankings, np.split(items, ends), np.split(scores, ends), strict=True):
            is_item = score > -np.inf
            rankings.append((ranking.sequence, item[is_item], score[is_item]))
        return rankings


class Runner:
    """The forward pass over a KV cache and, with a catalogue, the beam search over items, on one device."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        trie: Trie | None,
        cache: KvCache,
        graph_device: GraphDevice | None = None,
        ranks: EngineRanks | None = None,
    ) -> None:
        self._lead = ranks if isinstance(ranks, LeadRank) else None
        device = decoder.head_weight_VD.device
        weights = join_weights(decoder)
        forward = _forward_for(weights, config, cache, ranks)
        self.use_adapters = forward.use_adapters
        """Read the adapters of later steps from the given slots."""
        self.weight_bytes = forward.weight_bytes
        """Bytes of all weights, as they stay in memory."""
        ranker = BeamSearch(decoder.config, forward.logits, trie) if trie is not None else None
        samples = ranks is None or ranks.rank == 0
        self._eager = EagerSteps(
            forward, ranker, decoder.config.vocab_size, config.block_tokens, device, samples=samples
        )
        self._graphs = None
        graph_device = graph_device or _graph_device_for(device, config)
        if ranks is None and graph_device is not None and isinstance(forward, LayerLoop):
            self._graphs = StepGraphs(weights, config, forward, trie, graph_device)

    @property
    def records_steps(self) -> bool:
        """Whether decode and beam steps are replayed."""
        return self._graphs is not None

    @property
    def graph_counts(self) -> GraphCounts:
        """Events that must not happen after the warm-up."""
        return self._graphs.counts if self._graphs is not None else GraphCounts()

    def warm_up(self, progress: CaptureProgress) -> None:
        """Capture every decode and beam shape, if the device has graphs."""
        if self._graphs is not None:
            self._graphs.warm_up(progress)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> RunningStep:
        """Start one step that is not empty, without waiting for it."""
        if self._lead is not None:
            self._lead.send(plan)
        if self._graphs is None:
            return RunningStep(*self._eager.run(plan))
        rankings, sampled = self._replay(plan, self._graphs)
        if not plan.has_drafts:  # otherwise the host has to verify them before the next step
            self._graphs.keep(sampled)
        return RunningStep(rankings, sampled)

    def can_feed(self, plan: StepPlan) -> bool:
        """Whether a plan can be submitted before the results of the previous step are collected."""
        return self._graphs is not None and self._graphs.can_feed(plan)

    def _replay(self, plan: StepPlan, graphs: StepGraphs) -> tuple[list[RankedItems], SampledTokens]:
        """Start the graphs first: while the device runs them, the host launches the rest kernel by kernel."""
        rest, groups = graphs.cut(plan)
        rankings: list[RankedItems] = []
        sampled: SampledTokens = []
        for group in groups:
            if isinstance(group.shape, TextShape):
                sampled.append((group.sequences, graphs.run_text(group)))
            else:
                rankings += graphs.run_beams(group)
        if rest.is_empty:
            return rankings, sampled
        hidden_TD = graphs.prompt_hidden(rest)
        eager_rankings, eager_sampled = self._eager.run(rest) if hidden_TD is None else self._eager.end(rest, hidden_TD)
        return rankings + eager_rankings, sampled + eager_sampled


class EagerSteps:
    """Runs steps of any shape, kernel by kernel. `ranker` is None for a text-only engine.

    With `samples` false, texts get no tokens: another rank samples them.
    """

    def __init__(
        self,
        forward: Forward,
        ranker: BeamSearch | None,
        vocab_size: int,
        block_tokens: int,
        device: torch.device,
        *,
        samples: bool = True,
    ) -> None:
        self._samples = samples
        self._forward = forward
        self._ranker = ranker
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._device = device
        self._adapters = StepAdaptersCache(device)

    def run(self, plan: StepPlan) -> tuple[list[RankedItems], SampledTokens]:
        """Start a non-empty step. Returns the rankings that it completes and the sampled tokens. Does not wait."""
        beams = BeamBatch(plan.beam_steps) if plan.beam_steps else None
        tokens_T, positions_T = self._lay_out(plan, beams)
        slot_mapping_P = self._slot_mapping(plan)
        tails = beams.tails if beams is not None else None
        output_rows = plan.output_rows
        pages, rows_R = self._forward.prepare(plan), self._on_device(output_rows)
        adapters = self._adapters.of_plan(plan, output_rows)
        step = StepInputs(tokens_T, positions_T, slot_mapping_P, pages, tails, rows_R, adapters)
        return self._select(plan, beams, self._forward.hidden(step))

    def end(self, plan: StepPlan, hidden_TD: Tensor) -> tuple[list[RankedItems], SampledTokens]:
        """Return the rankings and tokens from the hidden states of a plan without beams; extra rows are ignored."""
        return self._select(plan, None, hidden_TD[self._on_device(plan.output_rows)])

    def _lay_out(self, plan: StepPlan, beams: BeamBatch | None) -> tuple[Tensor, Tensor]:
        tokens = [token for chunk in plan.chunks for token in chunk.tokens]
        ranges = [np.arange(chunk.start, chunk.end) for chunk in plan.chunks]
        ranges += [
            np.full(sequence.num_beam_rows, len(sequence.tokens) + sequence.num_levels_done - 1)
            for sequence in plan.beam_steps
        ]
        tokens_T = self._on_device(np.array(tokens, dtype=np.int64))
        if beams is not None:
            tokens_T = torch.cat((tokens_T, beams.token_B))
        return tokens_T, self._on_device(np.concatenate(ranges))

    def _slot_mapping(self, plan: StepPlan) -> Tensor:
        slots = [_slots_of(chunk, self._block_tokens) for chunk in plan.chunks]
        return self._on_device(np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64))

    def _select(
        self, plan: StepPlan, beams: BeamBatch | None, hidden_RD: Tensor
    ) -> tuple[list[RankedItems], SampledTokens]:
        """Return the rankings and tokens from the hidden states of the plan's output rows."""
        ending = [chunk.sequence for chunk in plan.chunks for _ in range(chunk.num_outputs)]
        ranked = [(sequence, row) for row, sequence in enumerate(ending) if sequence.num_levels]
        texts = [(sequence, row) for row, sequence in enumerate(ending) if not sequence.num_levels]
        rankings: list[RankedItems] = []
        if self._ranker is not None and ranked:
            rankings += self._ranker.begin(*self._rows_of(ranked, hidden_RD))
        if self._ranker is not None and beams is not None:
            rankings += self._ranker.extend(beams, hidden_RD[len(ending) :])
        return rankings, self._sample(*self._rows_of(texts, hidden_RD)) if texts and self._samples else []

    def _rows_of(self, ending: list[tuple[Sequence, int]], hidden_RD: Tensor) -> tuple[list[Sequence], Tensor]:
        rows = self._on_device(np.array([row for _, row in ending], dtype=np.int64))
        return [sequence for sequence, _ in ending], hidden_RD[rows]

    def _sample(self, sequences: list[Sequence], hidden_RD: Tensor) -> SampledTokens:
        logits_RV = self._forward.logits(hidden_RD, 0, self._vocab_size)
        draws = [draw for sequence in dict.fromkeys(sequences) for draw in SamplingInput.rows_of(sequence)]
        return [(sequences, sample(logits_RV, draws))]

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)


def _slots_of(chunk: Chunk, block_tokens: int) -> np.ndarray:
    positions = np.arange(chunk.start, chunk.end)
    return np.array(chunk.sequence.block_table)[positions // block_tokens] * block_tokens + positions % block_tokens


def _forward_for(weights: DecoderWeights, config: EngineConfig, cache: KvCache, ranks: EngineRanks | None) -> Forward:
    reduce = ranks.reduce if ranks is not None else None
    if weights.head_VD.device.type != "cuda":
        return cpu_forward(weights, cache, config, reduce)
    from services.llm.engine.gpu.forward import triton_forward  # Triton is not installed on every machine

    return triton_forward(weights, cache, reduce)


def _graph_device_for(device: torch.device, config: EngineConfig) -> GraphDevice | None:
    return CudaGraphDevice() if device.type == "cuda" and config.uses_graphs else None
