"""Acceptance in benchmarks.variants: relative to the engine's own int8, by quality loss and by speed or size."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.variants.__main__ import summarise
from models.bundle import Bundle
from pipelines.optimize.choice import judge
from pipelines.optimize.optimize import Optimised
from tests.unit.pipelines.optimize.test_choice import row

GAINS = np.random.default_rng(0).random(400)
MANIFEST = {"num_parameters": 11, "lineage": {"options": {"recipe": {"train": {"fit": {"epochs": 3}}}}}}


def test_only_what_is_fast_or_small_and_loses_little_is_accepted() -> None:
    """A variant needs 1.5 times the speed or 60 % of the bytes of int8, and both loss intervals above -1 %."""
    parent = row("parent", ms=4.0, size=200)
    rows = [
        row("int8", ms=3.0, size=100),
        row("small", ms=3.0, size=60),
        row("fast", ms=2.0, size=100),
        row("neither", ms=2.1, size=61),
        row("lossy", ms=1.0, size=10, low=-0.02),
        row("lossier-than-int8", ms=1.0, size=10),
    ]
    gains = {one.name: GAINS for one in [parent, *rows]} | {"lossier-than-int8": GAINS * 0.9}
    found = Optimised(parent, tuple(rows), judge(parent, rows, 0.01), {}, None, gains)

    summary = summarise(Bundle("v", Path("v"), MANIFEST), found)

    assert summary["accepted"] == ["small", "fast"]
    assert (summary["num_parameters"], summary["num_users"], summary["epochs"]) == (11, 400, 3)
    by_name = {one["name"]: SimpleNamespace(**one) for one in summary["rows"]}
    assert by_name["fast"].times_as_fast_as_int8 == 1.5
    assert by_name["small"].share_of_int8_bytes == 0.6
    assert by_name["lossier-than-int8"].from_int8["difference"] == pytest.approx(-0.1)
    assert summary["qat_minus_ptq"] is None
