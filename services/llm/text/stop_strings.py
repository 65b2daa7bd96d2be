"""Ends a text at the first of its stop strings, however the text is split into pieces. Pure."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on and holds back text that may be the beginning of a stop string.

    The text ends where the first stop string is complete; of several that are complete at the same place, at
    the longest. So the cut does not depend on the pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(string for string in stop if string)
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """Add text and return the part that is certain to be before any stop string; empty after the stop."""
        if self.has_stopped:
            return ""
        text, self._held = self._held + text, ""
        found = [(text.find(string) + len(string), text.find(string)) for string in self._stop if string in text]
        if found:
            self.has_stopped = True
            return text[: min(found)[1]]
        num_held = max((_num_begun(text, string) for string in self._stop), default=0)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text held back, where the text ended before a stop string was complete."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, string: str) -> int:
    """Count the characters at the end of the text that are the beginning of the string."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)
