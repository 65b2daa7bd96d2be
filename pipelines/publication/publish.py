"""Stage 9: the assembled bundle becomes a version of its own, and the pointer moves to it."""

from pathlib import Path
from typing import Any

from models.registry import Bundle, BundleStore
from services.features.reader import SERVICE


def publish(store: BundleStore, folder: Path, version: str, about: dict[str, Any]) -> Bundle:
    """Publish the folder under this version and make it live. A version that exists already is only made live."""
    bundle = store.publish(folder, version, about)
    store.promote(version)
    return bundle


def describe(report: dict[str, Any], training: dict[str, Any], prompt: dict[str, int], depth: int) -> dict[str, Any]:
    """Return what the manifest says beside the version and the hashes."""
    return {
        "dataset": report["dataset"],
        "feature_service": SERVICE,
        "prompt": prompt,
        "depth": depth,
        "num_items": report["num_items"],
        "num_parameters": training["num_parameters"],
        "multiply_adds": report["multiply_adds"],
        "metrics": {
            name: {metric: report["metrics"][name][metric] for metric in ("hr@10", "ndcg@10")}
            for name in ("decoder", "student")
        },
    }
