"""The commands in a block of shell, as words: enough of the grammar to find which programs a page calls. Runs nothing."""

import re
import shlex
from dataclasses import dataclass

_SEPARATORS = {"|", "||", "&&", ";", "&", "(", ")", "{", "}"}
_KEYWORDS = {"for", "do", "done", "while", "until", "if", "then", "else", "elif", "fi", "!", "time", "exec"}
_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_REDIRECTION = re.compile(r"[<>]+&?")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(?P<end>\w+)\1")


@dataclass(frozen=True, slots=True)
class Command:
    """One program and its arguments. `source` is the whole logical line, continued lines and here-documents included."""

    words: tuple[str, ...]
    source: str


def logical_lines(text: str) -> list[str]:
    """Cut shell text into lines as the shell reads them: quotes, `\\` at the end and here-documents go on. Raises ValueError."""
    found: list[str] = []
    pending = ""
    rest = iter(text.splitlines(keepends=True))
    for line in rest:
        pending += line
        if pending.rstrip("\n").endswith("\\") or _is_open(pending):
            continue
        if document := _HEREDOC.search(pending):
            for inner in rest:
                pending += inner
                if inner.strip() == document["end"]:
                    break
        if pending.strip():
            found.append(pending)
        pending = ""
    if pending.strip():
        raise ValueError(f"the shell would wait for more after: {pending.strip()}")
    return found


def commands(text: str) -> list[Command]:
    """Return the commands of a block in order; comments, assignments in front and redirections are left out."""
    found = []
    for line in logical_lines(text):
        first = line if not _HEREDOC.search(line) else line.splitlines()[0]
        words: list[str] = []
        for word in [*_split(first), ";"]:
            if word in _SEPARATORS:
                if cleaned := _clean(words):
                    found.append(Command(cleaned, line))
                words = []
            else:
                words.append(word)
    return found


def _clean(words: list[str]) -> tuple[str, ...]:
    while words and (words[0] in _KEYWORDS or _ASSIGNMENT.match(words[0])):
        if words[0] == "for":
            return ()
        words = words[1:]
    kept, in_redirection = [], False
    for place, word in enumerate(words):
        is_sign = bool(_REDIRECTION.fullmatch(word))
        is_number = word.isdigit() and place + 1 < len(words) and bool(_REDIRECTION.fullmatch(words[place + 1]))
        if not (in_redirection or is_sign or is_number):
            kept.append(word)
        in_redirection = is_sign
    return tuple(kept)


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    return list(lexer)


def _is_open(text: str) -> bool:
    """Whether a quote is still open."""
    head = _HEREDOC.split(text)[0] if _HEREDOC.search(text) else text
    try:
        _split(head)
    except ValueError:
        return True
    return False
