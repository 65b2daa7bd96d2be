"""The most popular items of a bundle, in its manifest: what a process shows of a bundle that it has not loaded yet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models.catalogue import Catalogue, load_catalogue
from models.errors import BundleCorrupt

_NUM_ITEMS = 100


def popular_items(source: Path) -> list[dict[str, Any]]:
    """Return the most popular items of a bundle's folder, best first; none without a readable catalogue."""
    try:
        catalogue = load_catalogue(source / "catalogue.parquet")
    except (BundleCorrupt, OSError):
        return []
    best = np.argsort(-catalogue.popularity, kind="stable")[:_NUM_ITEMS].tolist()
    return [
        {
            "item_id": catalogue.item_ids[index],
            "title": catalogue.titles[index],
            "categories": list(catalogue.categories[index]),
            "popularity": float(catalogue.popularity[index]),
        }
        for index in best
    ]


def popular_catalogue(manifest: Mapping[str, Any]) -> Catalogue | None:
    """Return a catalogue of the popular items that a manifest lists; None if it lists none."""
    items = manifest.get("popular") or ()
    if not items:
        return None
    return Catalogue(
        item_ids=tuple(item["item_id"] for item in items),
        titles=tuple(item["title"] for item in items),
        categories=tuple(tuple(item["categories"]) for item in items),
        codes=np.arange(len(items), dtype=np.int32)[:, None],
        level_sizes=(len(items),),
        popularity=np.array([item["popularity"] for item in items], dtype=np.float64),
    )
