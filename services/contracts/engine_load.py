"""The load of an engine; separate from the messages, because the engine runs without their libraries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load of one engine. `kv_cache_usage` is the fraction (0 to 1) of KV blocks that live requests hold."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
