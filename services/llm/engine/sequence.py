"""The state of one request inside the engine.

Owned by the scheduler; the runner reads it and keeps its device state here.
    tokens       |<- in blocks: num_computed_tokens ->|<- to compute ->|
    block_table  covers at least the tokens of the prompt, later every computed token
    beam steps   begin when all tokens are computed; they never enter the blocks

It does not know tensors: fields that hold tensors are declared by their base class (`Work`, `BeamState`), and only
dropped here.
"""

from dataclasses import dataclass, field

import numpy as np

from services.llm.engine.sampling_parameters import SampledToken, SamplingParams, TokenMask


class Work:
    """The runner's work for a request: `RankWork` or `TextWork`."""

    __slots__ = ()


class BeamState:
    """A ranking's beams between two steps: `Beams`, on the runner's device."""

    __slots__ = ()


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """State of one request. `rows_by_level[s]` is the number of beams of beam step s+1; empty for text.

    Lower `priority` goes first. Times are on the caller's clock in seconds; `deadline_s` None means no deadline.
    """

    request_id: str
    order: int
    tokens: list[int]
    priority: int
    arrival_s: float
    deadline_s: float | None
    num_levels: int = 0
    rows_by_level: tuple[int, ...] = ()
    levels_at_once: int = 1
    """Number of levels that a beam step selects: all remaining levels, or 1."""
    max_new_tokens: int = 0
    cache_scope: bytes = b""
    """Only sequences of an equal scope share cached blocks."""
    adapter: str = ""
    """Key of the adapter that its rows use; empty for the base."""
    adapter_slot: int = -1
    """The adapter's slot, held until the request ends."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share of the engine's budget and queue, relative to the other tenants'."""
    leader: "Sequence | None" = None
    """Another request with the same prompt, whose cached blocks this request waits for."""
    work: Work | None = None

    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request first ran."""
    num_levels_done: int = 0
    num_pending: int = 0
    """Number of tokens that started steps will add: 1, or 2 if a step was fed on the device. All counts include them
    already."""
    device_row: int = 0
    """Used by the runner: index of the last sampled token among the tokens of its step, on the device."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    generated: list[SampledToken] = field(default_factory=list)
    """The generated tokens (the end of `tokens`), with their logprobs if requested."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens after the last, which the started step verifies. No count includes them."""
    draft_masks: tuple[np.ndarray, ...] = ()
    """With a mask and drafts: the allowed tokens before each draft and after the last."""
    started_s: float | None = None
    decoding_s: float | None = None
    """Time at which its prompt was computed, if it had more work."""
    num_steps: int = 0
    num_preemptions: int = 0
    has_ended: bool = False
    """Whether it has an outcome; later results are ignored."""
    beams: BeamState | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_to_compute(self) -> int:
        """Number of tokens whose keys and values are not in the blocks yet."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and generated tokens."""
        return len(self.tokens) + self.num_pending

    @property
    def num_new_tokens(self) -> int:
        return len(self.generated) + self.num_pending

    @property
    def is_decoding(self) -> bool:
        """Whether only the last generated token is left to compute."""
        return self.num_new_tokens > 0 and self.num_to_compute == 1

    @property
    def next_beam_rows(self) -> tuple[int, ...]:
        """Rows of each level that the next beam step selects; empty while tokens are to be computed, and for text."""
        if self.num_to_compute or self.num_levels_done == 0:
            return ()
        return self.rows_by_level[self.num_levels_done - 1 :][: self.levels_at_once]

    @property
    def num_beam_rows(self) -> int:
        """Rows of the next beam step at its widest level."""
        return max(self.next_beam_rows, default=0)

    def urgency(self, now_s: float, ageing_s: float) -> tuple[float, int]:
        """Sort key: smallest first. Waiting lowers it, so that a low priority does not starve."""
        return (self.priority - (now_s - self.arrival_s) / ageing_s, self.order)

    @property
    def is_fully_scheduled(self) -> bool:
        """Whether the steps that were started complete the request."""
        if self.num_levels:
            return self.num_levels_done == self.num_levels
        return self.num_new_tokens == self.max_new_tokens

    @property
    def is_held_back(self) -> bool:
        """Whether its leader's prompt is still being computed."""
        return self.leader is not None and not (self.leader.has_ended or self.leader.num_new_tokens)

    def append_token(self, sampled: SampledToken) -> None:
        """Append a generated token, which was pending or a draft."""
        self.num_pending = max(0, self.num_pending - 1)
        self.tokens.append(sampled.token_id)
        self.generated.append(sampled)

    def restart(self) -> None:
        """Reset all computed state after the blocks were freed; generated tokens are kept and recomputed."""
        self.num_computed_tokens = 0
        self.num_levels_done = 0
        self.block_table = []
        self.beams = None
        self.drafts, self.draft_masks = (), ()
        self.num_preemptions += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWork(Work):
    """Sampling of the next token, and the tokens that end the text. `mask` is None if every token is allowed."""

    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    mask: TokenMask | None = None

    @property
    def needs_last_token(self) -> bool:
        """Whether the host must know the last token before it can prepare the next draw."""
        return self.mask is not None or self.sampling.changes_logits

    @classmethod
    def of(cls, sequence: Sequence) -> "TextWork":
        """Return the work of a text."""
        assert isinstance(sequence.work, cls), "only text is sampled"
        return sequence.work
