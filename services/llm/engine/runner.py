"""Carries a step out: lays its rows out flat, runs them through the decoder once, and chooses what comes next.

Rows are the chunks' tokens and then the beams, in plan order. It decides nothing and keeps no requests; the KV cache is
its own, beams live on their sequences. A step is submitted without waiting for the device, and collected later.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.decoder import Decoder
from services.llm.engine.beams import BeamBatch
from services.llm.engine.config import EngineConfig
from services.llm.engine.cpu.choice import cpu_forward
from services.llm.engine.forward import Forward, LayerLoop, StepInputs
from services.llm.engine.gpu.graph_device import CudaGraphDevice, GraphDevice
from services.llm.engine.gpu.graph_shapes import TextShape
from services.llm.engine.gpu.graphs import GraphCounts, Progress, StepGraphs
from services.llm.engine.kv_cache import KvCache
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.ranking import Ranker, Ranking
from services.llm.engine.sampling import Draw, Drawn, sample
from services.llm.engine.sequence import Sequence
from services.llm.engine.text import Chosen
from services.llm.engine.transfer import Arriving, to_device
from services.llm.engine.trie import Trie
from services.llm.engine.weights import Weights, join_weights
from services.llm.engine.work import TextWork


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: complete rankings, and one new token for each text request whose chunk was its last."""

    rankings: list[tuple[Sequence, np.ndarray, np.ndarray]]
    tokens: list[tuple[Sequence, Chosen]]


class RunningStep:
    """A step on the device, and what it will bring: the texts that get a token, and the rankings that it completes."""

    def __init__(self, rankings: list[Ranking], drawn: list[tuple[list[Sequence], Drawn]]) -> None:
        self._drawn = drawn
        self._rankings = rankings
        columns = [[ranking.item_W for ranking in rankings], [ranking.score_W for ranking in rankings]]
        self._ranked = Arriving([torch.cat(column) for column in columns] if rankings else [])

    def collect(self) -> StepResult:
        """Wait for the device."""
        tokens = [pair for sequences, drawn in self._drawn for pair in zip(sequences, drawn.chosen(), strict=True)]
        return StepResult(self._collect_rankings() if self._rankings else [], tokens)

    def _collect_rankings(self) -> list[tuple[Sequence, np.ndarray, np.ndarray]]:
        items, scores = self._ranked.arrays()
        ends = np.cumsum([len(ranking.item_W) for ranking in self._rankings])[:-1]
        found = []
        for ranking, item, score in zip(self._rankings, np.split(items, ends), np.split(scores, ends), strict=True):
            chosen = score > -np.inf
            found.append((ranking.sequence, item[chosen], score[chosen]))
        return found


class Runner:
    """The forward pass over its KV cache and, where there is a catalogue, the choice among items, on one device."""

    def __init__(
        self, decoder: Decoder, config: EngineConfig, trie: Trie | None, graph_device: GraphDevice | None = None
    ) -> None:
        weights = join_weights(decoder)
        self._vocab_size = decoder.config.vocab_size
        self._config = config
        self._device = weights.head_VD.device
        cache = KvCache(
            decoder.config,
            config.num_blocks + 1,
            config.block_tokens,
            weights.head_VD.dtype,
            self._device,
            config.kv_kind,
        )  # the last block is nobody's: rows that only pad are written there
        self._forward = _forward_for(weights, cache, config)
        self._ranker = Ranker(decoder.config, self._forward.logits, trie) if trie is not None else None
        self._graphs = None
        graph_device = graph_device or _graph_device_for(self._device, config)
        if graph_device is not None and isinstance(self._forward, LayerLoop):
            self._graphs = StepGraphs(weights, config, self._forward, trie, graph_device)

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
        """Start one step that is not empty: what is recorded by replaying it, the rest as it comes. Does not wait for it."""
        rest, groups = (plan, []) if self._graphs is None else self._graphs.cut(plan)
        rankings: list[Ranking] = []
        drawn: list[tuple[list[Sequence], Drawn]] = []
        if not rest.is_empty:
            rankings, drawn = self._run_as_it_comes(rest)
        if self._graphs is not None:
            for group in groups:
                if isinstance(group.shape, TextShape):
                    draws = [_draw_of(sequence) for sequence in group.sequences]
                    drawn.append((group.sequences, self._graphs.run_text(group, draws)))
                else:
                    rankings += self._graphs.run_beams(group)
        return RunningStep(rankings, drawn)

    def _run_as_it_comes(self, plan: StepPlan) -> tuple[list[Ranking], list[tuple[list[Sequence], Drawn]]]:
        beams = BeamBatch(plan.beam_steps) if plan.beam_steps else None
        tokens_T, positions_T = self._lay_out(plan, beams)
        slots_P = self._slots_of(plan)
        tails = beams.tails if beams is not None else None
        step = StepInputs(tokens_T, positions_T, slots_P, self._forward.prepare(plan), tails)
        return self._choose(plan, beams, self._forward.hidden(step))

    def _lay_out(self, plan: StepPlan, beams: BeamBatch | None) -> tuple[Tensor, Tensor]:
        tokens = [token for chunk in plan.chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]]
        ranges = [np.arange(chunk.start, chunk.end) for chunk in plan.chunks]
        ranges += [
            np.full(sequence.num_beam_rows, len(sequence.tokens) + sequence.num_levels_done - 1)
            for sequence in plan.beam_steps
        ]
        tokens_T = self._on_device(np.array(tokens, dtype=np.int64))
        if beams is not None:
            tokens_T = torch.cat((tokens_T, beams.token_B))
        return tokens_T, self._on_device(np.concatenate(ranges))

    def _slots_of(self, plan: StepPlan) -> Tensor:
        slots = [_slots(chunk, self._config.block_tokens) for chunk in plan.chunks]
        return self._on_device(np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64))

    def _choose(
        self, plan: StepPlan, beams: BeamBatch | None, hidden_TD: Tensor
    ) -> tuple[list[Ranking], list[tuple[list[Sequence], Drawn]]]:
        ends = np.cumsum([chunk.num_tokens for chunk in plan.chunks]) - 1
        ending = [(chunk.sequence, end) for chunk, end in zip(plan.chunks, ends, strict=True) if chunk.is_last]
        ranked = [pair for pair in ending if pair[0].num_levels]
        texts = [pair for pair in ending if not pair[0].num_levels]
        rankings: list[Ranking] = []
        if self._ranker is not None and ranked:
            rankings += self._ranker.begin(*self._last_hidden(ranked, hidden_TD))
        if self._ranker is not None and beams is not None:
            rankings += self._ranker.extend(beams, hidden_TD[plan.num_tokens :])
        return rankings, [self._sample(*self._last_hidden(texts, hidden_TD))] if texts else []

    def _last_hidden(self, ending: list[tuple[Sequence, int]], hidden_TD: Tensor) -> tuple[list[Sequence], Tensor]:
        rows = self._on_device(np.array([row for _, row in ending], dtype=np.int64))
        return [sequence for sequence, _ in ending], hidden_TD[rows]

    def _sample(self, sequences: list[Sequence], hidden_RD: Tensor) -> tuple[list[Sequence], Drawn]:
        logits_RV = self._forward.logits(hidden_RD, 0, self._vocab_size)
        return sequences, sample(logits_RV, [_draw_of(sequence) for sequence in sequences])

    def _on_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)


def _slots(chunk: Chunk, block_tokens: int) -> np.ndarray:
    positions = np.arange(chunk.start, chunk.end)
    return np.array(chunk.sequence.block_ids)[positions // block_tokens] * block_tokens + positions % block_tokens


def _forward_for(weights: Weights, cache: KvCache, config: EngineConfig) -> Forward:
    if weights.head_VD.device.type != "cuda":
        return cpu_forward(weights, cache, config)
    from services.llm.engine.gpu.forward import triton_forward  # Triton is not installed everywhere

    return triton_forward(weights, cache)


def _graph_device_for(device: torch.device, config: EngineConfig) -> GraphDevice | None:
    return CudaGraphDevice() if device.type == "cuda" and config.uses_graphs else None


def _draw_of(sequence: Sequence) -> Draw:
    assert isinstance(sequence.work, TextWork), "only text is sampled"
    mask = sequence.work.mask
    return Draw(
        sequence.work.sampling,
        sequence.tokens,
        sequence.num_prompt_tokens,
        mask.allowed() if mask is not None else None,
    )
