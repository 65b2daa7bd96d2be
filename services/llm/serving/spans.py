"""What a trace says of one request's way through the engine: its queue, prefill and decode, once it has ended.

The engine itself knows no traces: its outcome holds the moments, and the spans are made from them afterwards.
"""

from services.llm.serving.stream import Ended
from services.observability.tracing import note, past_span


def tell(ended: Ended) -> None:
    """Put the spans of an ended request below the open span, and its counts on it. Nothing where nothing is traced."""
    outcome = ended.outcome
    note(
        {
            "gen_ai.usage.input_tokens": outcome.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.num_cached_tokens,
            "tailrace.engine.steps": outcome.num_steps,
            "tailrace.engine.finish_reason": outcome.status.value,
        }
    )
    past_span("queue", outcome.arrival_s, ended.started_s)
    if outcome.started_s is not None:
        num_computed = outcome.num_prompt_tokens - outcome.num_cached_tokens
        past_span("prefill", ended.started_s, ended.decoding_s, {"tailrace.engine.computed_tokens": num_computed})
    if outcome.decoding_s is not None:
        past_span("decode", ended.decoding_s, ended.finished_s)
