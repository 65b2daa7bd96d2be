"""The messages from the OpenAI door to a text writer and back, piece by piece.

Small and typed, because Ray Serve pickles them. One request gives a stream: a `TextBegan`, any number of `TextPiece`s
(choices in any interleaving), a `TextDone`. Names and meanings of the settings are OpenAI's, and vLLM's for settings
that OpenAI lacks.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names under which chat templates look up a checkpoint's special tokens."""
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS})
"""The variables of a chat template that its renderer sets: callers cannot set them."""


class FinishReason(StrEnum):
    """Why a choice ended: a stop token or string, the token limit, or its deadline (reported as `length`)."""

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen. `seed` None: a random seed.

    `num_logprobs` None: no logprobs; 0: only the chosen token's.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """Write `n` continuations of one prompt: `messages` (rendered by the chat template), text, or token ids.

    `chat_template_kwargs` are JSON values that the template reads by these names, disjoint from TEMPLATE_NAMES.
    `max_tokens` None: the rest of the context, within the server's limit. `stop` strings end a choice and are not part
    of it. `json_schema` is the text of a JSON schema that every choice must satisfy; the empty object `{}` means any
    JSON. Our own writer always enforces it; other servers may require `is_schema_strict`. With `in_pieces` False each
    choice comes as one piece when it is done, which costs less. Lower `priority` is served first. `deadline_unix_s` is
    absolute wall time of the gateway's host; other hosts are sent the remaining time. `settings_sent` names the
    settings that the caller sent, even at their defaults: another server may have other defaults. `trace` is the W3C
    trace context as header pairs. `key_id` is the id of the caller's API key, empty for our own texts; `tenant` and
    `weight` are its tenant and that tenant's share of scarce capacity.
    """

    request_id: str
    model: str
    key_id: str = ""
    cache_salt: str = ""
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | None = None
    is_schema_strict: bool = False
    in_pieces: bool = True
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    deadline_unix_s: float | None = None
    settings_sent: frozenset[str] = frozenset()
    trace: tuple[tuple[str, str], ...] = ()

    @property
    def cache_scope(self) -> bytes:
        """Identify the texts that may share cached prefixes: texts of one tenant's key with one salt."""
        owner = [self.tenant, self.key_id, self.cache_salt]
        return hashlib.blake2b(json.dumps(owner).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token as text and bytes with its natural logprob; `top` are the most probable tokens there, best first.

    `text_offset` counts the characters of its choice that were complete before it; alternatives in `top` have none.
    """

    token: str
    token_bytes: bytes
    logprob: float
    top: "tuple[TokenLogprob, ...]" = ()
    text_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBegan:
    """The prompt was accepted: its length, and how much of it the prefix cache held."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """More text of choice `index`; complete UTF-8 always. The last piece of a choice has a `finish_reason`."""

    index: int
    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDone:
    """All choices ended."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


TextEvent = TextBegan | TextPiece | TextDone


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A served model: its name, the maximum context in tokens (None: unknown), and its start (Unix seconds).

    `template_variables` are the names that its chat template reads besides the messages, if known.
    """

    name: str
    max_context_tokens: int | None
    created_unix_s: int
    has_chat_template: bool = True
    template_variables: frozenset[str] = frozenset()


class TextWriter(Protocol):
    """A text writer: our own deployment, or another OpenAI-compatible server."""

    async def models(self) -> tuple[TextModel, ...]:
        """Return the models that are served. Raises DependencyUnavailable."""
        ...

    def write(self, request: TextRequest) -> AsyncIterator[TextEvent]:
        """Write; closing the iterator cancels the work within one step.

        Raises, before the first event or between events, InvalidRequest, NotFound, Overloaded, DeadlineExceeded or
        DependencyUnavailable.
        """
        ...
