"""The end-to-end tests of the embedded stack alone, with the reason; the others run against compose too."""

REASONS = {
    "test_stack_lifecycle.py": "is about `tailrace up` and its processes; tests/compose has its own",
    "test_chaos.py": "puts proxies between the parts of the embedded stack",
    "test_nodes.py": "starts a cluster of its own with the embedded stack's state",
    "test_docs.py": "runs the pages' commands, which name the embedded stack's ports",
    "test_console.py": "opens pages without an API key",
    "test_listening.py": "looks for processes of this machine, and sends no API key",
    "test_takeover.py": "looks for processes of this machine",
    "test_text.py": "asks for the text model of the embedded stack; tests/compose asks containers for text",
    "test_doors.py::test_the_printed_calls_work_when_pasted": "is about what `tailrace up` prints",
    "test_doors.py::test_status_shows_every_part": "is about `tailrace status`",
}
"""By file, or by file and test."""


def why_embedded_only(file: str, test: str) -> str | None:
    """Return why a test cannot run against compose; None when it can."""
    return REASONS.get(file) or REASONS.get(f"{file}::{test}")
