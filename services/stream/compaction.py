"""Which files of the offline log to merge next. Pure: sees spans, and neither files nor clock.

A file's tier is the power of four that its size has reached. The files of a tier and below are merged where there are many of
them and together they make a file of a higher tier; so an event is written anew at most once per tier, seven times in all,
and a partition ends with few files however slowly its events come.
"""

from collections.abc import Iterator, Sequence

from services.stream.log_files import Span

TIERS = 7
FULL_SIZE = 4**TIERS
"""No merged file is larger, which bounds the work of one merge."""
MIN_FILES = 32
MAX_FILES = 64


def choose_merge(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the oldest neighbours that are worth merging, smallest tier first; empty when none are. `spans` are in order."""
    for tier in range(TIERS):
        for run in _runs_below(spans, 4 ** (tier + 1)):
            if merged := _worth(_head(run), 4 ** (tier + 1)):
                return merged
    return ()


def _runs_below(spans: Sequence[Span], size: int) -> Iterator[list[Span]]:
    """Cut the spans into runs of neighbours that are all smaller than `size`."""
    run: list[Span] = []
    for span in spans:
        if span.size < size:
            run.append(span)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _head(run: list[Span]) -> tuple[Span, ...]:
    """Return the first of a run that make no more than a full file."""
    head = run[:MAX_FILES]
    while head and Span(head[0].first, head[-1].last).size > FULL_SIZE:
        head.pop()
    return tuple(head)


def _worth(head: tuple[Span, ...], higher: int) -> tuple[Span, ...]:
    size = Span(head[0].first, head[-1].last).size if head else 0
    is_many = len(head) >= MIN_FILES or (len(head) > 1 and size >= FULL_SIZE // 2)
    return head if is_many and size >= higher else ()
