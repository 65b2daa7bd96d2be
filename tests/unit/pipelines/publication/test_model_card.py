"""The model card of a bundle."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.catalogue import load_catalogue
from models.registry.store import BundleStore
from pipelines.evaluation.evaluate import read_report
from pipelines.evaluation.held_out import HeldOut
from pipelines.publication.bundle import publish
from pipelines.publication.manifest import about_models
from pipelines.publication.model_card import CARD, interval_plot, render
from pipelines.training.train_student import describe_earned, read_earned
from tests.unit.pipelines.conftest import Built

VALUES = st.floats(-1, 1, allow_subnormal=False)
ROWS = st.lists(st.tuples(VALUES, VALUES, VALUES).map(sorted), min_size=1, max_size=6)


@pytest.fixture
def manifest(built: Built, tmp_path: Path) -> dict[str, Any]:
    """The manifest of the trained models, published by force."""
    catalogue = load_catalogue(built.trained.tokenized / "catalogue.parquet")
    held_out = HeldOut(built.trained.tokenized, tmp_path, "tailrace pipeline --force")
    held_out.open("evaluation of new models")
    live = {"model": "decoder", "champion": "v1", "num_users": 40, "champion_ndcg": 0.9, "challenger_ndcg": 0.8}
    data = {
        "num_events": 480,
        "num_users": 40,
        "num_items": 30,
        "newest_event_us": 1_790_000_000_000_000,
        "notes": ["events: 40 exact duplicates are dropped"],
        "unusable_shares": {"recorded events": {"item_id not in items": 0.031}},
        "num_new_events": 1_200,
        "drift": {"items": 0.27},
    }
    lineage = {
        "data": {"events.parquet": "e" * 64},
        "code": "c0de",
        "options": {"split": "leave-one-out"},
        "seed": 7,
        "parents": {"started_from": "v0", "compared_with": "v1"},
        "stages": {"ingest": "1a", "train": "2b"},
        "command": "tailrace pipeline --force",
    }
    memory = {"predicted": {"weights": 3e6, "activations": 9e6}, "predicted_bytes": 12e6, "measured_bytes": 20e6}
    speed = {"tokens_per_s": 1_250.4, "flops_per_s": 2.5e9, "mfu": 0.0125, "memory": memory}
    training = {"num_parameters": 12_345, "num_tokens": 5_000, "speed": speed}
    made = about_models(read_report(built.evaluated), training, {"max_items": 10}, catalogue.depth, 0.001)
    rows = {"against_live": [live | {"low": -0.15, "high": -0.05}], "against_reference": []}
    judged = {"data": data, **rows, "about_reference": "v0 cannot be read", "forced": ["drift of items"]}
    made |= {"distillation": read_earned(built.trained.students_dir)}
    return made | judged | {"test_set": held_out.record(), "lineage": lineage}


def test_the_page_has_what_a_reader_decides_by(built: Built, manifest: dict[str, Any]) -> None:
    """The card has models with intervals, slices, routing, comparison, checks, test-set openings and lineage."""
    report = read_report(built.assembled / "bundle")

    page = render("v2", manifest, report)

    assert page.startswith("# Bundle v2\n")
    for name, metrics in report["metrics"].items():
        low, high = metrics["ndcg@10_interval"]
        assert f"| {name} | {metrics['ndcg@10']:.4f} | [{low:.4f}, {high:.4f}] |" in page
        assert f"| {name} | {metrics['coverage@10']:.1%} | {metrics['calibration@10']:.2f} [" in page
    for row in report["gain"]:
        both = f"{row['llm_ndcg']:.4f} | {row['student_ndcg']:.4f}"
        assert f"| {row['slice']} | {row['num_cases']} | {both} | {row['llm_minus_student']:+.4f} |" in page
    for words in (
        "the LLM is called for",
        f"| student | {describe_earned(manifest['distillation'])} |",
        "| decoder | v1 | 40 | 0.9000 | 0.8000 | [-0.1500, -0.0500] |",
        "published by force although: drift of items",
        "| recorded events not used: item_id not in items | 3.10% |",
        "| drift of items (PSI) | 0.270 |",
        "\n- events: 40 exact duplicates are dropped.\n",
        "opened up to 1 times in this state folder",
        "| `tailrace pipeline --force` | evaluation of new models |",
        f"| data: events.parquet | SHA-256 `{'e' * 64}` |",
        "| parent: started_from | v0 |",
        "| stage: train | `2b` |",
        "| random seed | 7 |",
        "12,345 parameters, codes of depth 1",
        "5,000 tokens, 1,250 a second, 2.5 GFLOP/s, 1.2% of the device's peak (MFU) |",
    ):
        assert words in page


def test_the_page_is_in_the_bundle_and_under_its_hash(built: Built, manifest: dict[str, Any], tmp_path: Path) -> None:
    """The card is listed in the manifest with its hash, like the models."""
    store = BundleStore(tmp_path / "bundles")

    published = publish(store, built.assembled / "bundle", "v2", manifest, {CARD: "# Bundle v2\n"})

    assert (published.path / CARD).read_text() == "# Bundle v2\n"
    assert CARD in published.manifest["files"]
    assert not (built.assembled / "bundle" / CARD).exists()


@given(rows=ROWS, zero=st.booleans())
def test_a_plot_keeps_the_order_of_its_values(rows: list[list[float]], *, zero: bool) -> None:
    """For any intervals, rows have equal width, `o` lies within its dashes, and larger values are not further left."""
    named = [(f"row{number}", *row) for number, row in enumerate(rows)]

    _, *lines, scale, _ = interval_plot(named, zero=zero).splitlines()  # type: ignore[arg-type]

    drawn = [re.fullmatch(r"row\d  (.{40})  [+-]?\d\.\d{4}", line) for line in lines]
    bodies = [match[1] for match in drawn if match]
    places = [(min(body.index(mark) for mark in "-o" if mark in body), body.index("o")) for body in bodies]
    assert len(bodies) == len(rows)
    assert len(scale.strip().split()) == 2
    assert all(first <= mean for first, mean in places)
    for (_, _, mean, _), (_, position) in zip(named, places, strict=True):
        for (_, _, other, _), (_, elsewhere) in zip(named, places, strict=True):
            assert position <= elsewhere or mean >= other
