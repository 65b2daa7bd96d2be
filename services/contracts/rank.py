"""The messages from the gateway to an LLM replica and back. Small and typed, because Ray Serve pickles them."""

from dataclasses import dataclass, field

from services.contracts.engine_load import EngineLoad
from services.contracts.recommend import Filters


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """Rank the next items after this history.

    `budget_ms` is the time left until the deadline when the request is sent; the replica counts it from the arrival on
    its own monotonic clock, since hosts' wall clocks differ. `excluded_item_ids` includes the seen and disliked items.
    `name` is the model name; the replica refuses a `bundle_version` that it does not serve under this name.
    Lower `priority` is served first. `replicas` names replicas in order of preference; empty for any. `trace` is the
    W3C trace context as header pairs, empty when the request is not traced.
    """

    request_id: str
    user_id: str | None
    bundle_version: str
    history_item_ids: tuple[str, ...]
    k: int
    budget_ms: float
    name: str = "default"
    excluded_item_ids: tuple[str, ...] = ()
    filters: Filters = field(default_factory=Filters)
    priority: int = 0
    replicas: tuple[str, ...] = ()
    trace: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The items, best first (score, then item index), with log-probabilities and timings.

    May hold fewer than k items when the masks leave fewer. `num_cached_tokens` of `num_prompt_tokens` came from the
    prefix cache. `compute_ms` is prefill and decode together; `num_steps` counts the engine steps that worked on it.
    `replica` names the answering replica; empty outside Ray Serve.
    """

    item_ids: tuple[str, ...]
    scores: tuple[float, ...]
    bundle_version: str
    num_prompt_tokens: int
    num_cached_tokens: int
    queue_ms: float
    compute_ms: float
    load: EngineLoad
    decode_ms: float = 0.0
    num_steps: int = 0
    replica: str = ""
