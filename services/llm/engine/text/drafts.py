"""Prompt-lookup speculation: drafts the next tokens of texts, which one step then verifies (Saxena 2023).

A draft continues an earlier occurrence of the text's last n tokens: in its prompt, in the text so far, or in a recent
text of the same cache scope. A draw depends only on logits, seed and position, so a draft is right if it is the token
that the step draws at its position. Texts equal the texts of plain decoding, sampled or greedy.

The number of drafts maximises the expected tokens per second, from the measured acceptance and the measured times of
steps. So drafts end where they do not pay: in large batches, and in texts that repeat nothing. Pure: no torch and no
clock.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from statistics import median

import numpy as np

from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sampling_parameters import SampledToken, TokenMask
from services.llm.engine.sequence import Sequence, TextWork

MAX_ROWS = 11
"""Maximum number of rows of a step with drafts. The CPU kernels compute up to this many rows bit by bit like single
rows. In larger steps a row costs about what it can save."""
_SIZES = (3, 2, 1)
"""Lengths of the n-grams, in the order of lookup."""
_BETWEEN = -1
"""Separates texts in a scope's table."""
_MAX_SCOPES, _MAX_SCOPE_TOKENS = 32, 4_096
_LEARNING_RATE = 0.1
_RETRY_RATE = 0.002
"""Rate at which the acceptance of drafts that do not pay returns to its first value, so that they are tried again."""
_FIRST_ACCEPTANCE = 0.5
_MEMORY_STEPS = 256
"""A time that was not measured again within this many steps is forgotten, so that its number of rows is tried again."""
_LEAST_GAIN = 1.05
"""Expected gain below which a step has no drafts: less than the error of the measured times."""
_WINDOW = 9
"""Number of recent steps in a median."""
_SHORTEST_S = 1e-9
"""A coarse clock may measure zero."""


@dataclass(slots=True)
class DraftCounts:
    """Draft tokens so far, and how many of them were right."""

    num_drafted: int = 0
    num_accepted: int = 0


class Drafter:
    """The drafts of one engine, at most `most` per text and step."""

    def __init__(self, most: int, block_tokens: int, max_num_batched_tokens: int) -> None:
        self.counts = DraftCounts()
        self._most = most
        self._block_tokens = block_tokens
        self._max_rows = min(MAX_ROWS, max_num_batched_tokens)
        self._tables: dict[Sequence, NgramTable] = {}
        self._scopes: OrderedDict[bytes, NgramTable] = OrderedDict()
        self._sizes: dict[Sequence, int] = {}
        self._acceptance = dict.fromkeys(_SIZES, _FIRST_ACCEPTANCE)
        self._times = DecodeTimes()

    def could_draft(self, plan: StepPlan) -> bool:
        """Whether the step could have drafts once all its tokens are known."""
        return len(plan.chunks) < self._max_rows and not plan.beam_steps and all(map(_decodes, plan.chunks))

    def with_drafts(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the drafts of its texts, which are set in `Sequence.drafts`.

        Only steps of pure text decode have drafts. Drafts take free slots of the blocks that a text holds, so they
        never cause an eviction or a preemption.
        """
        if not self.could_draft(plan) or any(chunk.sequence.num_pending for chunk in plan.chunks):
            return plan
        if not self._could_pay(len(plan.chunks)):
            for size in _SIZES:
                self._unlearn(size)
            return plan
        proposals = [self._find(chunk.sequence) for chunk in plan.chunks]
        counts = self._counts([(self._acceptance[size], len(tokens)) for size, tokens in proposals])
        chunks = []
        for chunk, (size, tokens), count in zip(plan.chunks, proposals, counts, strict=True):
            if tokens and not count:
                self._unlearn(size)
            _set_drafts(chunk.sequence, tokens[:count])
            self._sizes[chunk.sequence] = size
            chunks.append(replace(chunk, num_tokens=1 + len(chunk.sequence.drafts)))
        return replace(plan, chunks=chunks)

    def verify(self, sequence: Sequence, sampled: list[SampledToken]) -> list[SampledToken]:
        """Return the sampled tokens up to the first that differs from its draft, and end the drafts.

        `sampled` are the tokens that the step drew after the last token and after each draft.
        """
        drafts, sequence.drafts, sequence.draft_masks = sequence.drafts, (), ()
        pairs = zip(drafts, sampled, strict=False)
        num_right = next((index for index, (draft, token) in enumerate(pairs) if draft != token.token_id), len(drafts))
        self.counts.num_drafted += len(drafts)
        self.counts.num_accepted += num_right
        size = self._sizes.get(sequence, _SIZES[0])
        for index in range(min(num_right + 1, len(drafts))):
            self._acceptance[size] += _LEARNING_RATE * ((index < num_right) - self._acceptance[size])
        return sampled[: num_right + 1]

    def forget(self, sequence: Sequence) -> None:
        """End a text: its tokens serve later texts of its scope."""
        self._sizes.pop(sequence, None)
        if self._tables.pop(sequence, None) is None:
            return
        scope = self._scopes.setdefault(sequence.cache_scope, NgramTable([]))
        self._scopes.move_to_end(sequence.cache_scope)
        if len(self._scopes) > _MAX_SCOPES:
            self._scopes.popitem(last=False)
        scope.extend([*sequence.tokens[sequence.num_prompt_tokens :][-_MAX_SCOPE_TOKENS // 2 :], _BETWEEN])
        if len(scope.tokens) > _MAX_SCOPE_TOKENS:
            self._scopes[sequence.cache_scope] = NgramTable(scope.tokens[-_MAX_SCOPE_TOKENS // 2 :])

    def record_step_time(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step of pure text decode."""
        if num_rows <= self._max_rows:
            self._times.record(num_rows, seconds)

    def _find(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Return the length of the longest match and the tokens after it; no tokens without a match or free slots."""
        table = self._tables.get(sequence)
        if table is None:
            table = self._tables[sequence] = NgramTable(sequence.tokens)
        table.extend(())
        scope = self._scopes.get(sequence.cache_scope)
        num_slots = len(sequence.block_table) * self._block_tokens - sequence.num_tokens - 1
        count = min(self._most, num_slots, sequence.max_new_tokens - sequence.num_new_tokens - 1)
        for size in _SIZES if count > 0 else ():
            for source in (table, scope):
                if source is not None and (tokens := source.after(sequence.tokens[-size:], count)):
                    return size, tokens
        return _SIZES[0], []

    def _could_pay(self, num_texts: int) -> bool:
        """Whether a step could have drafts if each text had enough of them, without looking for any."""
        acceptance = max(self._acceptance.values())
        proposed = -(-(self._max_rows - num_texts) // num_texts)
        return any(self._counts([(acceptance, min(self._most, proposed))] * num_texts))

    def _unlearn(self, size: int) -> None:
        self._acceptance[size] += _RETRY_RATE * (_FIRST_ACCEPTANCE - self._acceptance[size])

    def _counts(self, drafts: Tokens[tuple[float, int]]) -> list[int]:
        """Return the number of drafts for each text, given its acceptance and its number of proposed tokens.

        The most probable drafts are taken, as many as maximise the expected tokens per second. A number of rows that
        was not measured is tried.
        """
        counts, chosen = [0] * len(drafts), [0] * len(drafts)
        tokens, rows = float(len(drafts)), len(drafts)
        if not self._times.knows(rows):
            return chosen  # measures the step without drafts
        best_rate = _LEAST_GAIN * tokens / self._times.of(rows)
        queue = [(-acceptance, index) for index, (acceptance, length) in enumerate(drafts) if length]
        heapify(queue)
        while queue and rows < self._max_rows:
            gain, index = -queue[0][0], queue[0][1]
            acceptance, length = drafts[index]
            counts[index] += 1
            tokens, rows = tokens + gain, rows + 1
            heapreplace(queue, (-gain * acceptance, index)) if counts[index] < length else heappop(queue)
            if tokens / self._times.of(rows) > best_rate:
                best_rate, chosen = tokens / self._times.of(rows), counts.copy()
            if not self._times.knows(rows):
                break
        return chosen


class NgramTable:
    """The latest position after each n-gram of a list of tokens, which its owner may append to."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._num_indexed = 0
        self._after: dict[int, int] = {}
        self.extend(())

    def extend(self, more: Tokens[int]) -> None:
        """Append tokens, and index all n-grams that have a next token."""
        tokens = self.tokens
        tokens += more
        for end in range(self._num_indexed, len(tokens)):
            for size in _SIZES:
                if end >= size:
                    self._after[hash(tuple(tokens[end - size : end]))] = end
        self._num_indexed = len(tokens)

    def after(self, ngram: Tokens[int], count: int) -> list[int]:
        """Return up to `count` tokens after the n-gram's latest occurrence; empty without an occurrence.

        An occurrence that overlaps the end repeats.
        """
        start = self._after.get(hash(tuple(ngram)))
        if start is None:
            return []
        tokens = self.tokens[start : start + count]
        tokens = (tokens * -(-count // len(tokens)))[:count]
        return tokens[: tokens.index(_BETWEEN)] if _BETWEEN in tokens else tokens


class DecodeTimes:
    """The recent times of text decode steps, by number of rows. Without any measurement all are equal."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._seconds: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}

    def record(self, num_rows: int, seconds: float) -> None:
        """Record a step."""
        self._num_steps += 1
        self._seconds.setdefault(num_rows, deque(maxlen=_WINDOW)).append(seconds)
        self._measured_at[num_rows] = self._num_steps
        for rows in [rows for rows, at in self._measured_at.items() if self._num_steps - at > _MEMORY_STEPS]:
            del self._seconds[rows], self._measured_at[rows]

    def knows(self, num_rows: int) -> bool:
        """Whether a step with this many rows was measured, or none at all."""
        return num_rows in self._seconds or not self._seconds

    def of(self, num_rows: int) -> float:
        """Return the time of a step: of the next fewer rows that were measured if it was not."""
        if not self._seconds:
            return 1.0
        known = max((rows for rows in self._seconds if rows <= num_rows), default=min(self._seconds))
        return max(median(self._seconds[known]), _SHORTEST_S)


def masks_along(mask: TokenMask, drafts: Tokens[int]) -> list[np.ndarray]:
    """Return the allowed tokens before each draft and after the last; ends before a draft that is not allowed."""
    ahead, rows = mask.fork(), []
    for draft in (*drafts, None):
        allowed = ahead.allowed().copy()
        if ahead.failure is not None:
            break
        rows.append(allowed)
        if draft is None or not allowed[draft // 32] >> draft % 32 & 1:
            break
        ahead.take(draft)
    return rows


def _set_drafts(sequence: Sequence, drafts: list[int]) -> None:
    mask = TextWork.of(sequence).mask
    if mask is not None and drafts:
        sequence.draft_masks = tuple(masks_along(mask, drafts))
        drafts = drafts[: max(0, len(sequence.draft_masks) - 1)]
    sequence.drafts = tuple(drafts)


def _decodes(chunk: Chunk) -> bool:
    return chunk.sequence.is_decoding
