"""Carries a step out: lays its rows out flat, runs the decoder once over all of them, and chooses what comes next.

Rows are the chunks' tokens and then the beams, in plan order. It decides nothing and keeps no requests; the KV cache is
its own, beams live on their sequences. One copy to the host per step, at its end.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.decoder import Decoder
from services.llm.engine.attention import PagedAttention, TorchAttention, merge_attention, tail_attention
from services.llm.engine.beams import BeamBatch
from services.llm.engine.config import EngineConfig
from services.llm.engine.kv_cache import KvCache
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.ranking import Ranker, Ranking
from services.llm.engine.sampling import Draw, sample
from services.llm.engine.sequence import Sequence
from services.llm.engine.text import Chosen
from services.llm.engine.trie import Trie
from services.llm.engine.work import TextWork


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: complete rankings, and one new token for each text request whose chunk was its last."""

    rankings: list[tuple[Sequence, np.ndarray, np.ndarray]]
    tokens: list[tuple[Sequence, Chosen]]


class Runner:
    """The decoder, its KV cache and, where there is a catalogue, its trie, on one device."""

    def __init__(self, decoder: Decoder, config: EngineConfig, trie: Trie | None) -> None:
        weight = decoder.head_weight_VD
        self._decoder = decoder
        self._config = config
        self._device = weight.device
        self._cache = KvCache(
            decoder.config, config.num_blocks, config.block_tokens, weight.dtype, weight.device, config.kv_kind
        )
        self._attention = _attention_for(decoder, config, weight.device)
        self._ranker = Ranker(decoder, trie) if trie is not None else None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Run one step that is not empty."""
        beams = BeamBatch(plan.beam_steps) if plan.beam_steps else None
        tokens_T, positions_T = self._lay_out(plan, beams)
        hidden_TD = self._decoder(tokens_T, positions_T, self._attend_for(plan, beams))
        rankings, tokens = self._choose(plan, beams, hidden_TD)
        return StepResult(_rankings_to_host(rankings), tokens)

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

    def _attend_for(self, plan: StepPlan, beams: BeamBatch | None) -> "_Attend":
        slots = [_slots(chunk, self._config.block_tokens) for chunk in plan.chunks]
        slots_P = self._on_device(np.concatenate(slots) if slots else np.zeros(0, dtype=np.int64))
        return _Attend(self._cache, slots_P, self._attention, self._attention.prepare(plan), beams)

    def _choose(
        self, plan: StepPlan, beams: BeamBatch | None, hidden_TD: Tensor
    ) -> tuple[list[Ranking], list[tuple[Sequence, Chosen]]]:
        ends = np.cumsum([chunk.num_tokens for chunk in plan.chunks]) - 1
        ending = [(chunk.sequence, end) for chunk, end in zip(plan.chunks, ends, strict=True) if chunk.is_last]
        ranked = [pair for pair in ending if pair[0].num_levels]
        texts = [pair for pair in ending if not pair[0].num_levels]
        rankings: list[Ranking] = []
        if self._ranker is not None and ranked:
            rankings += self._ranker.begin(*self._last_hidden(ranked, hidden_TD))
        if self._ranker is not None and beams is not None:
            rankings += self._ranker.extend(beams, hidden_TD[plan.num_tokens :])
        return rankings, self._sample(*self._last_hidden(texts, hidden_TD)) if texts else []

    def _last_hidden(self, ending: list[tuple[Sequence, int]], hidden_TD: Tensor) -> tuple[list[Sequence], Tensor]:
        rows = self._on_device(np.array([row for _, row in ending], dtype=np.int64))
        return [sequence for sequence, _ in ending], hidden_TD[rows]

    def _sample(self, sequences: list[Sequence], hidden_RD: Tensor) -> list[tuple[Sequence, Chosen]]:
        logits_RV = functional.linear(hidden_RD, self._decoder.head_weight_VD).float()
        return list(zip(sequences, sample(logits_RV, [_draw_of(sequence) for sequence in sequences]), strict=True))

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _Attend:
    """One step's attention, as the decoder calls it in each layer."""

    def __init__(
        self,
        cache: KvCache,
        slots_P: Tensor,
        attention: PagedAttention[Any],
        prepared: object,
        beams: BeamBatch | None,
    ) -> None:
        self._cache = cache
        self._slots_P = slots_P
        self._attention = attention
        self._prepared = prepared
        self._beams = beams

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """Store the step's keys and values where they belong, then attend each row over its context."""
        num_paged = len(self._slots_P)
        self._cache.write(layer, self._slots_P, k_TGK[:num_paged], v_TGK[:num_paged])
        out_THK, lse_TH = self._attention.attend(q_THK, self._cache, layer, self._prepared)
        if self._beams is None:
            return out_THK
        beams = self._beams
        beams.write(layer, k_TGK[num_paged:], v_TGK[num_paged:])
        tail, tail_lse = tail_attention(
            q_THK[num_paged:], beams.keys_YBLGK[layer], beams.values_YBLGK[layer], beams.seen_BL
        )
        out_THK[num_paged:] = merge_attention(out_THK[num_paged:], lse_TH[num_paged:], tail, tail_lse)
        return out_THK


def _slots(chunk: Chunk, block_tokens: int) -> np.ndarray:
    positions = np.arange(chunk.start, chunk.end)
    return np.array(chunk.sequence.block_ids)[positions // block_tokens] * block_tokens + positions % block_tokens


def _attention_for(decoder: Decoder, config: EngineConfig, device: torch.device) -> PagedAttention[Any]:
    if device.type != "cuda":
        return TorchAttention(config.tile_queries, config.tile_tokens, config.block_tokens, device)
    from services.llm.engine.triton_attention import TritonAttention

    shape = decoder.config
    return TritonAttention(shape.num_attention_heads, shape.num_key_value_heads, config.block_tokens, device)


def _draw_of(sequence: Sequence) -> Draw:
    assert isinstance(sequence.work, TextWork), "only text is sampled"
    mask = sequence.work.mask
    return Draw(
        sequence.work.sampling, sequence.tokens, sequence.num_prompt_tokens, mask.allowed() if mask is not None else None
    )


def _rankings_to_host(rankings: list[Ranking]) -> list[tuple[Sequence, np.ndarray, np.ndarray]]:
    if not rankings:
        return []
    items = torch.cat([ranking.item_W for ranking in rankings]).cpu().numpy()
    scores = torch.cat([ranking.score_W for ranking in rankings]).cpu().numpy()
    ends = np.cumsum([len(ranking.item_W) for ranking in rankings])[:-1]
    found = []
    for ranking, item, score in zip(rankings, np.split(items, ends), np.split(scores, ends), strict=True):
        chosen = score > -np.inf
        found.append((ranking.sequence, item[chosen], score[chosen]))
    return found
