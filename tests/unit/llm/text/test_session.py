"""Routing by session: which requests are sent to the same replica."""

from services.contracts.text import ChatMessage, TextRequest
from services.llm.handles import session_of


def chat(*turns: tuple[str, str], **fields) -> TextRequest:
    """A request with these turns."""
    messages = tuple(ChatMessage(role=role, content=content) for role, content in turns)
    return TextRequest(request_id="r", model="m", messages=messages, **fields)


def prompt(value: str | tuple[int, ...]) -> TextRequest:
    """A request with this prompt."""
    return TextRequest(request_id="r", model="m", prompt=value)


def test_a_conversation_keeps_its_session() -> None:
    """Later turns and other settings do not change the session."""
    first = chat(("system", "be brief"), ("user", "hello"))
    later = chat(("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "and now?"), n=3)

    assert session_of(first) == session_of(later)


def test_conversations_that_begin_differently_have_different_sessions() -> None:
    """Content, role and the border between turns count."""
    requests = [
        chat(("system", "be brief"), ("user", "hello")),
        chat(("system", "be brief"), ("user", "hello!")),
        chat(("system", "be long"), ("user", "hello")),
        chat(("user", "be brief"), ("user", "hello")),
        chat(("system", "be briefhello"), ("user", "")),
        chat(("system", "be brief")),
        prompt("be brief"),
        prompt(()),
    ]

    assert len({session_of(request) for request in requests}) == len(requests)


def test_the_session_of_a_prompt_depends_on_its_beginning() -> None:
    """256 characters of text or 64 token ids count; a lone surrogate is accepted."""
    assert session_of(prompt("x" * 256)) == session_of(prompt("x" * 256 + "y"))
    assert session_of(prompt("x" * 255)) != session_of(prompt("x" * 255 + "y"))
    assert session_of(prompt((7,) * 64)) == session_of(prompt((7,) * 64 + (8,)))
    assert session_of(prompt((1, 23))) != session_of(prompt((12, 3)))
    assert session_of(prompt("\ud800"))
