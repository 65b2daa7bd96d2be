"""One request's life inside the engine. Owned by the scheduler; the runner reads it and keeps its device state here.

    tokens       |<- in blocks: num_computed ->|<- to compute ->|
    block_ids    cover at least the tokens of the prompt, later every computed token
    beam steps   begin when all tokens are computed; they never enter the blocks

It knows no tensors: `beams` is the runner's and is only dropped here.
"""

from dataclasses import dataclass, field

from services.llm.engine.text.parameters import Chosen


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """State of one request. `rows_by_level[s]` is how many beams step s+1 runs; text has none and no levels.

    Lower `priority` goes first. Times are on the caller's clock in seconds; `deadline_s` None means none.
    """

    request_id: str
    order: int
    tokens: list[int]
    priority: int
    arrival_s: float
    deadline_s: float | None
    num_levels: int = 0
    rows_by_level: tuple[int, ...] = ()
    max_new_tokens: int = 0
    leader: "Sequence | None" = None
    """Another request with the same prompt, whose cached blocks this one waits for."""
    work: object = None
    """What the runner needs to know of the request: masks and k, or sampling settings."""

    num_prompt_tokens: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    """Tokens that the prefix cache gave when the request first ran."""
    num_levels_done: int = 0
    is_token_awaited: bool = False
    """Whether a step that was started brings one more token; all that counts tokens counts it already."""
    block_ids: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)
    chosen: list[Chosen] = field(default_factory=list)
    """The generated tokens, which are the end of `tokens`, with their logprobs where these were asked for."""
    started_s: float | None = None
    decoding_s: float | None = None
    """When its prompt was found done and there was more to do."""
    num_steps: int = 0
    num_preemptions: int = 0
    has_ended: bool = False
    """Whether its outcome was given; nothing counts any more."""
    beams: object = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose keys and values are not in the blocks yet."""
        return self.num_tokens - self.num_computed

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and generated ones."""
        return len(self.tokens) + self.is_token_awaited

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.chosen) + self.is_token_awaited

    @property
    def is_decoding(self) -> bool:
        """Whether only the token generated last is left to compute."""
        return self.num_new_tokens > 0 and self.num_to_compute == 1

    @property
    def num_beam_rows(self) -> int:
        """Rows of the next beam step; 0 while tokens are to be computed, and for text."""
        if self.num_to_compute or self.num_levels_done == 0 or self.num_levels_done == self.num_levels:
            return 0
        return self.rows_by_level[self.num_levels_done - 1]

    def urgency(self, now_s: float, ageing_s: float) -> tuple[float, int]:
        """Sort key: the smallest goes first. Waiting lowers it, so that a low class is not starved."""
        return (self.priority - (now_s - self.arrival_s) / ageing_s, self.order)

    @property
    def is_spent(self) -> bool:
        """Whether the steps that were started bring all that was asked for."""
        if self.num_levels:
            return self.num_levels_done == self.num_levels
        return self.num_new_tokens == self.max_new_tokens

    @property
    def is_held_back(self) -> bool:
        """Whether its leader's prompt is still being computed."""
        return self.leader is not None and not (self.leader.has_ended or self.leader.num_new_tokens)

    def take(self, chosen: Chosen) -> None:
        """Go on by one generated token."""
        self.is_token_awaited = False
        self.tokens.append(chosen.token_id)
        self.chosen.append(chosen)

    def restart(self) -> None:
        """Forget all computed state after the blocks are gone; generated tokens are kept and computed again."""
        self.num_computed = 0
        self.num_levels_done = 0
        self.block_ids = []
        self.beams = None
        self.num_preemptions += 1
