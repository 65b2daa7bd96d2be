"""Builds sequences from requests, after validation against the model and the catalogue.

Requests that could never run are rejected with an error that names the field. The module does not know the queue; the
scheduler rejects requests when the queue is full.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import count

import numpy as np

from models.decoder.config import DecoderConfig
from services.errors import InvalidRequest
from services.llm.engine.beam.item_mask import ItemMasks, RankWork
from services.llm.engine.beam.trie import Trie
from services.llm.engine.config import EngineConfig
from services.llm.engine.sampling_parameters import SamplingParams, TokenMask
from services.llm.engine.sequence import Sequence, TextWork


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The fields common to all requests. Times are in seconds on the caller's clock."""

    request_id: str
    prompt_token_ids: Tokens[int]
    priority: int
    arrival_s: float
    deadline_s: float | None


class RequestBuilder:
    """Builds the sequences of one engine, numbered in order of request. `trie` is None for an engine without catalogue.

    A prompt and its text together have at most `max_tokens` tokens, limited by positions and KV memory. If steps are
    recorded as graphs, a ranking that fits a recorded shape runs all its levels in one step.
    """

    def __init__(
        self, config: EngineConfig, decoder: DecoderConfig, trie: Trie | None, max_tokens: int, *, records_steps: bool
    ) -> None:
        self._config = config
        self._records_steps = records_steps
        self._vocab_size = decoder.vocab_size
        self._max_positions = decoder.max_position_embeddings
        self._max_tokens = max_tokens
        self._trie = trie
        self._masks = ItemMasks(trie) if trie is not None else None
        self._orders = count()

    def rank(
        self,
        request: EngineRequest,
        k: int,
        allowed: np.ndarray | None,
        excluded: Tokens[int] | np.ndarray,
        beam_width: int | None,
    ) -> tuple[Sequence, int]:
        """Return the sequence of an `Engine.add_rank` request and its number of allowed items.

        Raises InvalidRequest naming the field.
        """
        if self._trie is None or self._masks is None:
            raise InvalidRequest("k", "this engine has no catalogue", "send a text request")
        if k < 1:
            raise InvalidRequest("k", f"{k} is out of range", "send at least 1")
        if beam_width is not None and beam_width < 1:
            raise InvalidRequest("beam_width", f"{beam_width} is out of range", "send at least 1")
        excluded_items = np.asarray(excluded, dtype=np.int64)
        _check_masks(allowed, excluded_items, self._trie.num_items)
        longest = min(self._max_tokens, self._max_positions - (self._trie.depth - 1))
        sequence = self._sequence(request, longest_prompt=longest)
        item_mask = self._masks.of(allowed, excluded_items)
        *inner, num_items = item_mask.num_by_level
        beams = beam_width or min(max(k, self._config.default_beam_width), self._config.max_beam_rows)
        sequence.num_levels = self._trie.depth
        sequence.rows_by_level = tuple(min(beams, num_nodes) for num_nodes in inner)
        work = RankWork(item_mask=item_mask, width_by_level=(*sequence.rows_by_level, min(k, num_items)))
        sequence.work = work
        if self._records_steps and max(work.width_by_level) <= self._config.max_beam_rows:
            sequence.levels_at_once = self._trie.depth
        return sequence, num_items

    def text(
        self,
        request: EngineRequest,
        max_new_tokens: int,
        sampling: SamplingParams,
        stop_token_ids: Iterable[int],
        mask: TokenMask | None,
    ) -> Sequence:
        """Return the sequence of an `Engine.add_text` request. Raises InvalidRequest naming the field."""
        if max_new_tokens < 1:
            raise InvalidRequest("max_new_tokens", f"{max_new_tokens} is out of range", "send at least 1")
        self._check_tokens("logit_bias", sampling.logit_bias)
        sequence = self._sequence(request, longest_prompt=self._max_tokens - 1)
        room = self._max_tokens - len(sequence.tokens)
        if max_new_tokens > room:
            after = f"{max_new_tokens} after a prompt of {len(sequence.tokens)}"
            raise InvalidRequest("max_new_tokens", after, f"send at most {room}")
        sequence.max_new_tokens = max_new_tokens
        sequence.work = TextWork(sampling=sampling, stop_token_ids=frozenset(stop_token_ids), mask=mask)
        return sequence

    def _sequence(self, request: EngineRequest, *, longest_prompt: int) -> Sequence:
        tokens = list(request.prompt_token_ids)
        if not 1 <= len(tokens) <= longest_prompt:
            raise InvalidRequest("prompt", f"{len(tokens)} tokens long", f"send 1 to {longest_prompt}")
        self._check_tokens("prompt", tokens)
        return Sequence(
            request_id=request.request_id,
            order=next(self._orders),
            tokens=tokens,
            priority=request.priority,
            arrival_s=request.arrival_s,
            deadline_s=request.deadline_s,
        )

    def _check_tokens(self, field: str, tokens: Collection[int]) -> None:
        if min(tokens, default=0) < 0 or max(tokens, default=0) >= self._vocab_size:
            raise InvalidRequest(field, "a token outside the vocabulary", f"send 0 to {self._vocab_size - 1}")


def _check_masks(allowed: np.ndarray | None, excluded: np.ndarray, num_items: int) -> None:
    if allowed is not None and (allowed.shape != (num_items,) or allowed.dtype != np.bool_):
        raise InvalidRequest("allowed", "not one bool per item", f"send a mask of {num_items}")
    if len(excluded) and not 0 <= excluded.min() <= excluded.max() < num_items:
        raise InvalidRequest("excluded", "an item outside the catalogue", f"send 0 to {num_items - 1}")
