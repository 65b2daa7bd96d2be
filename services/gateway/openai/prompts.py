"""What a model is to go on with, out of a body: prompts, or the turns of a chat. Pure."""

from typing import Any

from services.contracts.text import TEMPLATE_NAMES, ChatMessage
from services.errors import InvalidRequest
from services.gateway.openai.schema import MAX_PROMPTS, ChatBody, CompletionBody, TextPartBody

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def prompts_of(asked: CompletionBody) -> list[str | tuple[int, ...]]:
    """Return each prompt. A list of numbers is one prompt of token ids. Raises InvalidRequest for none."""
    sent = asked.prompt
    if isinstance(sent, str):
        return [sent]
    if sent and all(isinstance(part, int) for part in sent):
        return [tuple(part for part in sent if isinstance(part, int))]
    prompts = [part if isinstance(part, str) else tuple(part) for part in sent if not isinstance(part, int)]
    if not prompts:
        raise InvalidRequest("prompt", "no prompts", f"send 1 to {MAX_PROMPTS}")
    return prompts


def messages_of(asked: ChatBody) -> tuple[ChatMessage, ...]:
    """Return each turn as text. Raises InvalidRequest naming the turn."""
    return tuple(
        ChatMessage(role=_role(turn.role, place), content=_content(turn.content, place))
        for place, turn in enumerate(asked.messages)
    )


def variables_of(asked: ChatBody) -> dict[str, Any]:
    """Return what the chat template is told beside the turns. Raises InvalidRequest for what is not the caller's to tell."""
    if ours := next((name for name in asked.chat_template_kwargs if name in TEMPLATE_NAMES), None):
        raise InvalidRequest(f"chat_template_kwargs.{ours}", "set by the door itself", "leave it out")
    return asked.chat_template_kwargs


def _role(role: str, place: int) -> str:
    if role not in _ROLES:
        raise InvalidRequest(f"messages[{place}].role", f"{role!r:.40} is not supported", f"send {', '.join(_ROLES)}")
    return _ROLES[role]


def _content(content: str | list[TextPartBody], place: int) -> str:
    """Return a message's text; parts are put together as they are."""
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            where = f"messages[{place}].content[{number}]"
            raise InvalidRequest(where, f"{part.type!r:.40} is not supported", "send parts of the type text alone")
    return "".join(part.text or "" for part in content)
