"""Measured numbers in the pages' tables equal the results files; `python -m benchmarks.pages` updates the pages."""

import pytest

from benchmarks.pages.__main__ import PAGES, filled, table_names
from benchmarks.pages.table import result
from tests.support.pages import ROOT


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
