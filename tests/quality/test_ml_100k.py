"""What the bundle of a real run on ml-100k must reach. Run: pytest tests/quality/test_ml_100k.py [--state FOLDER]"""

from typing import Any

import pytest

from models.registry import BundleStore
from tests.support.stack import Stack

pytestmark = [pytest.mark.quality, pytest.mark.timeout(1_800)]

REFERENCES = {"popularity": (0.0838, 0.0436), "bigram": (0.1442, 0.0766), "item_knn": (0.1665, 0.0934)}
"""Known HR@10 and NDCG@10, masked, of the baselines under this protocol."""


@pytest.fixture(scope="module")
def report(stack: Stack) -> dict[str, Any]:
    """The report in the bundle that the stack serves: `tailrace up` ran the pipeline once."""
    return BundleStore(stack.settings.bundle_root).live().report()


@pytest.mark.parametrize("baseline", REFERENCES)
def test_baselines_give_their_known_values(report: dict[str, Any], baseline: str) -> None:
    """The protocol is the one of the references: same split, same masks, same ties."""
    found = report["metrics"][baseline]

    assert (round(found["hr@10"], 4), round(found["ndcg@10"], 4)) == REFERENCES[baseline]


def test_decoder_is_good_enough(report: dict[str, Any]) -> None:
    """Masked NDCG@10 of the decoder."""
    assert report["metrics"]["decoder"]["ndcg@10"] >= 0.115


def test_student_keeps_what_the_decoder_knows(report: dict[str, Any]) -> None:
    """95 % of the decoder's NDCG@10."""
    assert report["student_share"] >= 0.95


@pytest.mark.parametrize("model", ["decoder", "student"])
def test_models_beat_item_knn(report: dict[str, Any], model: str) -> None:
    """Both are worth their training."""
    assert report["metrics"][model]["ndcg@10"] > report["metrics"]["item_knn"]["ndcg@10"]


def test_student_is_far_cheaper_than_the_decoder(report: dict[str, Any]) -> None:
    """At most a quarter of the multiply-adds, and under a millisecond for one ranking."""
    assert report["multiply_adds"]["student"] <= report["multiply_adds"]["decoder"] / 4
    assert report["student_serving"]["rank_p50_ms"] < 1.0


def test_bundle_tells_what_serving_needs(stack: Stack, report: dict[str, Any]) -> None:
    """Prompt, feature service, depth and the metrics stand in the manifest."""
    manifest = BundleStore(stack.settings.bundle_root).live().manifest

    assert manifest["prompt"] == {"max_items": 200, "stride": 50}
    assert manifest["feature_service"] == "recommend_v1"
    assert manifest["depth"] == 1
    assert manifest["metrics"]["decoder"]["ndcg@10"] == report["metrics"]["decoder"]["ndcg@10"]
