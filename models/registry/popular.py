"""The most popular items of a bundle, in its manifest: what a process shows of a bundle that it has not loaded yet."""

import marshal
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


def served(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a manifest that requests read: garbage collections would visit each popular item."""
    return {name: value for name, value in manifest.items() if name not in ("popular", "files")}


def pack(manifest: Mapping[str, Any]) -> bytes | None:
    """Return the served part of a manifest, and its popular items by column, for `unpack`; None if it lists none."""
    items = manifest.get("popular") or ()
    if not items:
        return None
    columns = (
        tuple(item["item_id"] for item in items),
        tuple(item["title"] for item in items),
        tuple(tuple(item["categories"]) for item in items),
        np.array([item["popularity"] for item in items], dtype=np.float64).tobytes(),
    )
    return marshal.dumps((served(manifest), *columns))


def unpack(content: bytes) -> tuple[dict[str, Any], Catalogue]:
    """Return the served part of a manifest, and its popular items. `content` must be of this process."""
    manifest, item_ids, titles, categories, popularity = marshal.loads(content)  # noqa: S302 - bytes of this process
    catalogue = Catalogue(
        item_ids=item_ids,
        titles=titles,
        categories=categories,
        codes=np.arange(len(item_ids), dtype=np.int32)[:, None],
        level_sizes=(len(item_ids),),
        popularity=np.frombuffer(popularity),
    )
    return manifest, catalogue
