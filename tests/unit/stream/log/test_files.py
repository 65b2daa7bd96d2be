"""The choice of files to merge."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.stream.log.files import (
    FULL_SIZE,
    MAX_FILES,
    MIN_FILES,
    TIERS,
    Span,
    choose_merge,
    current,
    current_files,
    span_of,
)

SIZES = st.lists(st.sampled_from([1, 1, 1, 2, 7, 40, 900, 20_000]), max_size=400)


def spans_of(sizes: list[int]) -> list[Span]:
    """Return adjacent spans of these sizes."""
    spans, first = [], 0
    for size in sizes:
        spans.append(Span(first, first + size - 1))
        first += size
    return spans


def merged_once(spans: list[Span], *, has_ended: bool = False) -> tuple[list[Span], tuple[Span, ...]]:
    """Apply a chosen merge as the log does."""
    parts = choose_merge(spans, has_ended=has_ended)
    if not parts:
        return spans, ()
    return sorted([*(set(spans) - set(parts)), Span(parts[0].first, parts[-1].last)]), parts


@given(SIZES)
def test_merging_keeps_every_offset_and_ends_with_few_files(sizes: list[int]) -> None:
    """Only neighbours are merged, within the size limit, until each tier has fewer files than a merge needs."""
    spans = before = spans_of(sizes)

    while parts := choose_merge(spans):
        assert MIN_FILES <= len(parts) <= MAX_FILES or sum(part.size for part in parts) >= FULL_SIZE // 2
        assert sum(part.size for part in parts) <= FULL_SIZE
        spans, _ = merged_once(spans)

    assert all(left.last + 1 == right.first for left, right in pairwise(spans))
    assert [(spans[0].first, spans[-1].last)] == [(before[0].first, before[-1].last)] if before else not spans
    num_small = sum(span.size < FULL_SIZE // 4 for span in spans)
    assert num_small <= (MIN_FILES - 1) * TIERS * (1 + sum(size >= FULL_SIZE // 4 for size in sizes))


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.grid) for size in (1, 100))])
def test_an_event_is_rewritten_a_few_times_only(size: int) -> None:
    """Each event is rewritten at most once per tier, over a day with a new file every ten seconds."""
    spans: list[Span] = []
    times_written: Counter[int] = Counter()
    for index in range(8_640):
        spans.append(Span(index * size, (index + 1) * size - 1))
        spans, parts = merged_once(spans)
        for part in parts:
            times_written[part.first] += 1

    assert max(times_written.values()) <= TIERS
    assert len(spans) <= (MIN_FILES - 1) * TIERS + 8_640 * size // (FULL_SIZE // 4)


@given(SIZES)
def test_a_day_that_has_ended_has_as_few_files_as_its_events_need(sizes: list[int]) -> None:
    """No two neighbours are left that fit into one file, and no offset is lost."""
    spans = before = spans_of(sizes)
    parts: tuple[Span, ...] = (Span(0, 0),)
    num_merges = 0

    while parts:
        spans, parts = merged_once(spans, has_ended=True)
        num_merges += 1

    assert all(left.size + right.size > FULL_SIZE for left, right in pairwise(spans))
    assert [span for span in spans if span.size > FULL_SIZE] == [span for span in before if span.size > FULL_SIZE]
    assert all(left.last + 1 == right.first for left, right in pairwise(spans))
    assert num_merges <= 1 + len(before)


def test_few_files_are_left_alone() -> None:
    """Fewer files than MIN_FILES, and full files, are not merged."""
    assert choose_merge(spans_of([1] * (MIN_FILES - 1))) == ()
    assert choose_merge(spans_of([FULL_SIZE] * 100)) == ()
    assert choose_merge([]) == ()
    assert len(choose_merge(spans_of([1] * MIN_FILES))) == MIN_FILES


def test_what_lies_in_another_is_not_current(tmp_path: Path) -> None:
    """Files whose span another file contains are dropped; partial overlaps and other files stay."""
    spans = [Span(0, 9), Span(0, 4), Span(5, 9), Span(3, 12), Span(13, 13), Span(13, 13)]
    here, there = tmp_path / "a", tmp_path / "b"
    paths = [here / span.name for span in spans[:3]] + [there / Span(0, 4).name, tmp_path / "own.parquet"]

    assert current(spans) == [Span(0, 9), Span(3, 12), Span(13, 13)]
    assert current_files(paths) == [here / Span(0, 9).name, there / Span(0, 4).name, tmp_path / "own.parquet"]


@given(st.integers(0, 10**15), st.integers(0, 10**6))
def test_names_are_read_back_and_sort_as_spans_do(first: int, more: int) -> None:
    """File names sort in the order of the log, and give the number of offsets."""
    span, later = Span(first, first + more), Span(first + 1, first + 1)

    assert span_of(Path(span.name)) == span
    assert (span.name < later.name) == (span < later)
    assert span.size == more + 1
    assert span_of(Path("1.parquet")) is None
