"""Measured numbers in the pages equal the results files; `python -m benchmarks.pages` updates the pages."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from string import Formatter
from typing import Any

import pytest

from benchmarks.pages.__main__ import PAGES, filled, table_names
from benchmarks.pages.table import result
from pipelines.profiler.verdict import COMPUTE_SHARE, LOSSES, MEMORY_SHARE
from tests.support.pages import ROOT


class Words(Formatter):
    """Formats strings over a result's fields. `!p` scales to percent; a unit may follow the format; None prints `-`."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return a field's value, or None for a missing field."""
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):
            return None, field_name

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Scale a number."""
        return 100 * value if conversion == "p" else value

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format a number with its unit."""
        number, space, unit = format_spec.partition(" ")
        return "-" if value is None else format(value, number) + space + unit


def written(name: str, place: str, words: str) -> list[str]:
    """Format the words with the row or rows at a path of a results file, such as `a.0.b` or `rows.name=x`."""
    found: Any = result(name)
    for part in filter(None, place.split(".")):
        name, equals, value = part.partition("=")
        if equals:
            found = [row for row in found if row[name] == value]
        else:
            found = found[int(part)] if isinstance(found, list) else found[part]
    return [Words().format(words, **row) for row in (found if isinstance(found, list) else [found])]


def train_lines() -> Iterator[str]:
    """Yield a line for each training layout and text checkpoint, and the killed ranks."""
    parts = {name: part["rows"] for name, part in result("train")["parts"].items()}
    for row in parts["layouts"]:
        shares = [f"{row['shares_of_time'][name]:.0%}" for name in ("step", "others")]
        yield (
            f"| {row['workers']} x {row['parallel']} | {row['losses'][-1]:.6f} | {row['loss_difference']:.1e} | "
            f"{' | '.join(shares)} |"
        )
    for row in parts["text"]:
        if not row["moved_by"]:
            yield f"| {row['workers']} x {row['parallel']} | {row['losses'][0]:.6f} | {row['losses'][-1]:.4f} |"
    (killed,) = parts["kills"]
    yield f"Killed were {' and '.join(killed['kills'])}"


def plan_words() -> Iterator[str]:
    """Yield the planner's errors by group of runs."""
    plan = result("plan")
    groups = plan["groups"]
    shares = {name: f"{100 * group['share_within_interval']:.0f} %" for name, group in groups.items()}
    yield f"{shares['data']} of the other half lie in the interval"
    yield f"{groups['parallel']['number']} cited runs"
    yield f"{shares['parallel']} lie in the interval that the other sources gave"


def profile_words() -> Iterator[str]:
    """Yield the profiler's thresholds."""
    for kind, share in LOSSES.items():
        yield f"| {kind.value} | {100 * share:.0f} % |"
    yield f"| memory, compute | {100 * MEMORY_SHARE:.0f} %, {100 * COMPUTE_SHARE:.0f} % |"


SCALE = "docs/scale.md"
COMPUTED = {
    SCALE: (train_lines, profile_words, plan_words),
}
IN_WORDS: list[tuple[str, str, str, str]] = [
    ("docs/capacity.md", "capacity", "store.by_kind.history", (
        "A history takes {mean_bytes:,} bytes, the mean over MovieLens' {rows} users"
    )),
    ("docs/capacity.md", "capacity", "store.by_kind.list", "A stored list of 100 items takes {mean_bytes:,} bytes"),
    (SCALE, "plan", "", "fitted to {num_fitted_rows} published runs"),
    (SCALE, "plan", "cross.halves", (
        "Over {number} random halves the median error is {median_error_points:.2f} points of MFU, "
        "{worst_median_error_points:.2f} at worst"
    )),
    (SCALE, "profile", "", "{named} of {plants} named, {accused} of {healthy} healthy ones accused"),
]  # fmt: skip
"""Per entry: page, results file, path in the file, and the text that the page prints for each row."""
PRINTED = [
    *((page, lines) for page, sources in COMPUTED.items() for lines in sources),
    *((page, partial(written, *where)) for page, *where in IN_WORDS),
]
IDS = [
    *(lines.__name__ for sources in COMPUTED.values() for lines in sources),
    *(f"{name} {path}" for _, name, path, _ in IN_WORDS),
]


@pytest.mark.parametrize(("page", "lines"), PRINTED, ids=IDS)
def test_pages_print_what_is_on_file(page: str, lines: Callable[[], Iterable[str]]) -> None:
    """Pages print table rows and the numbers within sentences, regardless of line breaks."""
    text = " ".join((ROOT / page).read_text().split())
    wanted = [" ".join(words.split()) for words in lines()]

    assert wanted
    assert [words for words in wanted if words not in text] == []


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_made_from_the_results_files(page: str) -> None:
    """`python -m benchmarks.pages` changes no page."""
    text = (ROOT / page).read_text()

    assert table_names(text)
    assert filled(text) == text


def test_promises_hold_in_the_results_files() -> None:
    """No event was lost or counted twice, no beam was invalid, and a killed training had the same result."""
    fates = [
        row[sent][fate]
        for row in result("faults")["rows"]
        for sent in ("events", "batches")
        for fate in ("lost", "doubled")
    ]
    validity = result("engine-validity")

    assert not any(fates)
    assert (validity["beams"] >= 1_000_000, validity["invalid"]) == (True, 0)
    assert all(row["is_same"] for row in result("train")["parts"]["kills"]["rows"])
