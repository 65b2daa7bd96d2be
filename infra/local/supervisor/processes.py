"""The processes of a stack's parts, found through the stack's record."""

from contextlib import suppress

import psutil

from infra.local.supervisor.keeper import children_of
from infra.local.supervisor.stackfile import PartRecord

REPLICA = "ray::ServeReplica:tailrace:"
"""The prefix of a Ray Serve replica's process title; its deployment's name follows."""


def process_tree(part: PartRecord | None) -> list[psutil.Process]:
    """Return a part's process followed by its descendants; empty if it does not run."""
    for pid in children_of(part.keeper_pid) if part and part.keeper_pid else ():
        with suppress(psutil.Error):
            top = psutil.Process(pid)
            return [top, *top.children(recursive=True)]
    return []


def name_of(process: psutil.Process) -> str:
    """Return the title that Ray gave a process, else its program's name; "" when it has ended."""
    with suppress(psutil.Error):
        title = " ".join(process.cmdline()).strip()
        return title if title.startswith("ray::") else str(process.name())
    return ""
