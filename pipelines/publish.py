"""Stage 9: everything that must match goes into one bundle, and the pointer moves to it."""

import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from models.registry import Bundle, BundleStore, hashes
from pipelines.stage import content_key

FEATURE_SERVICE = "recommend_v1"


def assemble(decoder_dir: Path, student: Path, catalogue: Path, report: Path, out: Path) -> None:
    """Lay the bundle's files out as models/registry.py wants them."""
    shutil.copytree(decoder_dir, out / "decoder")
    for source, name in ((student, "student.onnx"), (catalogue, "catalogue.parquet"), (report, "report.json")):
        shutil.copyfile(source, out / name)


def version_of(folder: Path, made_at: datetime) -> str:
    """Name a bundle by when it was made (UTC) and what is in it."""
    return f"{made_at:%Y%m%dT%H%M%SZ}-{content_key(hashes(folder))[:8]}"


def publish(store: BundleStore, folder: Path, version: str, about: dict[str, Any]) -> Bundle:
    """Publish the assembled folder under this version and make it live."""
    bundle = store.publish(folder, version, about)
    store.promote(version)
    return bundle
