"""Tiny random bundles for tests: a catalogue and a decoder, published in a folder; the student is an empty file."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.catalogue import Catalogue
from models.decoder.adapter import ADAPTER, save_adapter
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder, save_decoder
from models.registry.bundle import JUDGED, Bundle
from models.registry.canary import Canary
from models.registry.manifest import MANIFEST
from models.registry.name_record import NameRecord
from models.registry.store import BundleStore
from tests.support.engine.adapters import build_adapter
from tests.support.engine.attention_shapes import attention_shape

MAX_ITEMS, STRIDE = 20, 5


def build_catalogue(num_items: int = 30) -> Catalogue:
    """Build items i0, i1, ... of depth 1; even items are of category even, the rest of odd."""
    return Catalogue(
        item_ids=tuple(f"i{index}" for index in range(num_items)),
        titles=tuple(f"Item {index}" for index in range(num_items)),
        categories=tuple(("even",) if index % 2 == 0 else ("odd",) for index in range(num_items)),
        codes=np.arange(num_items, dtype=np.int32)[:, None],
        level_sizes=(num_items,),
        popularity=np.arange(num_items, dtype=np.float64),
    )


def build_decoder(vocab_size: int, seed: int) -> Decoder:
    """Build a random decoder."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    return Decoder(attention_shape(2, 2, 8, layers=1, **sizes)).eval()


def with_judged_pair(bundle: Path, out: Path) -> Path:
    """Copy a bundle's folder with its own pair also as the judged pair; return the copy."""
    shutil.copytree(bundle, out)
    served = shutil.ignore_patterns("student.onnx", "student_table", "report.json", "code_book.safetensors")
    shutil.copytree(bundle, out / JUDGED, ignore=served)
    return out


def publish_bundle(root: Path, version: str, seed: int = 0, num_items: int = 30) -> Bundle:
    """Publish a bundle and promote it."""
    source = root.parent / f"source-{version}"
    catalogue = build_catalogue(num_items)
    save_decoder(build_decoder(catalogue.vocab_size, seed), source / "decoder")
    catalogue.save(source / "catalogue.parquet")
    (source / "student.onnx").write_bytes(b"")
    (source / "report.json").write_text(json.dumps({}))
    return live_store(root, source, version, {"prompt": {"max_items": MAX_ITEMS, "stride": STRIDE}}).live()


def live_store(root: Path, folder: Path, version: str, about: dict[str, Any], *more: Any) -> BundleStore:
    """Return a store whose live bundle has this folder's content and this version."""
    store = BundleStore(root)
    store.publish(folder, version, about, *more)
    store.promote(version)
    return store


def point_to(root: Path, version: str, canary: Canary | None = None) -> None:
    """Point the default name to a version and a canary, bypassing the store's checks."""
    path = root / "names" / "default.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(NameRecord(live=version, canary=canary).encode())


def publish_adapter(
    root: Path, version: str, parent: Bundle, seed: int, rank: int = 2, name: str = "default"
) -> Bundle:
    """Publish an adapter of a bundle's decoder, and promote it under a name."""
    source = root.parent / f"source-{version}"
    decoder = load_decoder(parent.decoder_dir, torch.float32, "cpu")
    shutil.copytree(parent.path, source, ignore=shutil.ignore_patterns(MANIFEST))
    weak = build_adapter(decoder, rank, seed)
    adapter = replace(weak, pairs={name: pair._replace(scale=1.0) for name, pair in weak.pairs.items()})
    save_adapter(adapter, decoder.config, source / "decoder" / ADAPTER)
    store = BundleStore(root, name)
    about = {"prompt": parent.manifest["prompt"], "adapter": {"of": parent.version}}
    bundle = store.publish(source, version, about)
    store.promote(version)
    return bundle
