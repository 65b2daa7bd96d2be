"""New items join the live bundle without training: codes from its book, rows of the student from these codes, and the same decoder.

Old items keep their codes and their rows. The new version is made live like any other, so gateways and replicas take it over within seconds.
"""

import shutil
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import onnx
import polars as pl
import torch

from models.catalogue import Catalogue
from models.registry import Bundle, BundleStore
from models.student import StudentModel, read_student, save_student
from pipelines.codes.embedding import texts_of
from pipelines.codes.reuse import KeptCodes, extended_codes, kept_codes
from pipelines.data import schema
from pipelines.publication.bundle import publish, version_of
from pipelines.publication.model_card import CARD
from pipelines.publication.student_graph import student_graph
from pipelines.training.item_rows import fill_rows
from services.errors import ConfigError


def append_items(store: BundleStore, raw_items: pl.DataFrame, table: str, now: datetime) -> tuple[Bundle, int]:
    """Publish the live bundle with the items that it lacks, and return it with their number; without new ones it stays as it is.

    Raises ConfigError for codes of depth 1, which a training alone extends; DataError naming `table`; BundleNotFound, BundleCorrupt.
    """
    live = store.live()
    live.verify()
    items = schema.check_items(raw_items, table).good
    kept = kept_codes(live.path)
    if kept is None:
        raise ConfigError(
            f"{live.version}: its codes have depth 1, a token an item; train once with `tailrace pipeline --code-depth 3`"
        )
    new = items.filter(~pl.col("item_id").is_in(list(kept.catalogue.item_ids)))
    if not len(new):
        return live, 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        shutil.copytree(live.path, folder, ignore=shutil.ignore_patterns("manifest.json"))
        catalogue = with_items(kept, new)
        catalogue.save(folder / "catalogue.parquet")
        student = with_rows(read_student(folder / "student.safetensors"), kept.catalogue, catalogue)
        save_student(student, folder / "student.safetensors")
        onnx.save(student_graph(student), folder / "student.onnx")
        about = {name: value for name, value in live.manifest.items() if name not in {"version", "files"}}
        about["num_items"] = len(catalogue.item_ids)
        about["lineage"] = about.get("lineage", {}) | {"items_added_to": live.version}
        if (card := folder / CARD).exists():
            note = f"This bundle is {live.version} with {len(new)} items more, without training; what follows is on that one.\n\n"
            card.write_text(note + card.read_text())
        return publish(store, folder, version_of(folder, now), about), len(new)


def with_items(kept: KeptCodes, new: pl.DataFrame) -> Catalogue:
    """Return the bundle's catalogue with new items, each at its place by id, with codes from the book and no training event."""
    old, order = kept.catalogue, new.sort("item_id")
    ids = (*old.item_ids, *order["item_id"])
    codes = extended_codes(ids, ["" for _ in old.item_ids] + texts_of(order), kept)
    place = sorted(range(len(ids)), key=ids.__getitem__)
    titles = (*old.titles, *order["title"])
    categories = (*old.categories, *(tuple(names) for names in order["categories"].to_list()))
    popularity = np.concatenate([old.popularity, np.zeros(len(order))])
    return replace(
        old,
        item_ids=tuple(ids[number] for number in place),
        titles=tuple(titles[number] for number in place),
        categories=tuple(categories[number] for number in place),
        codes=codes[place],
        popularity=popularity[place],
    )


@torch.no_grad()
def with_rows(student: StudentModel, before: Catalogue, now: Catalogue) -> StudentModel:
    """Return the student over the larger catalogue: old rows as they are, those of new items from their codes."""
    wider = StudentModel(replace(student.config, num_items=len(now.item_ids)))
    old = np.array([before.index_of.get(item_id, -1) for item_id in now.item_ids])
    rows = torch.from_numpy(np.concatenate(([0], np.maximum(old, 0) + 1)))
    weights = student.state_dict()
    wider.load_state_dict(weights | {"embedding.weight": weights["embedding.weight"][rows]})
    unused = np.flatnonzero(old < 0)
    fill_rows(wider, now, unused)
    return wider.eval()
