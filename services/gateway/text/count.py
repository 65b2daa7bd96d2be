"""The tokens of one text, as its events pass. Pure."""

from dataclasses import replace

from services.contracts.text import TextBegan, TextDone, TextEvent, TextPiece

NOTHING = TextDone(num_prompt_tokens=0, num_cached_tokens=0, num_completion_tokens=0)


def counted(so_far: TextDone, event: TextEvent) -> TextDone:
    """Return the count after this event; a writer's own TextDone has the last word."""
    match event:
        case TextBegan():
            return replace(so_far, num_prompt_tokens=event.num_prompt_tokens, num_cached_tokens=event.num_cached_tokens)
        case TextPiece():
            return replace(so_far, num_completion_tokens=so_far.num_completion_tokens + event.num_tokens)
        case TextDone():
            return event


def added(one: TextDone, other: TextDone) -> TextDone:
    """Return the count of two texts together."""
    return TextDone(
        num_prompt_tokens=one.num_prompt_tokens + other.num_prompt_tokens,
        num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
        num_completion_tokens=one.num_completion_tokens + other.num_completion_tokens,
    )
