"""Keeps a bundle's codes in a later training: old items keep their codes, new items get codes of the same code book."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.catalogue import Catalogue, load_catalogue
from models.files import file_sha256
from pipelines.codes.code_book import CODE_BOOK, CodeBook, load_code_book, make_code_book
from pipelines.codes.options import CodesOptions


@dataclass(frozen=True, slots=True, eq=False)
class KeptCodes:
    """A bundle's code book, its catalogue, and a hash of both."""

    book: CodeBook
    catalogue: Catalogue
    key: str


def kept_codes(bundle: Path) -> KeptCodes | None:
    """Read the codes of a bundle's folder; None where its codes have depth 1. Raises BundleCorrupt."""
    path = bundle / CODE_BOOK
    if not path.exists():
        return None
    catalogue = load_catalogue(bundle / "catalogue.parquet")
    digest = hashlib.sha256("\0".join(catalogue.item_ids).encode() + catalogue.codes.tobytes())
    digest.update(file_sha256(path).encode())
    return KeptCodes(load_code_book(path), catalogue, digest.hexdigest()[:16])


def new_codes(
    item_ids: Sequence[str],
    texts: Sequence[str],
    sequences: Sequence[np.ndarray],
    depth: int,
    options: CodesOptions,
    kept: KeptCodes | None,
) -> tuple[CodeBook, np.ndarray]:
    """Return the code book and the items' codes; the kept code book is reused if it has this depth."""
    if kept is None or len(kept.book.levels) != depth:
        return make_code_book(texts, sequences, depth, options)
    return kept.book, extended_codes(item_ids, texts, kept)


def extended_codes(item_ids: Sequence[str], texts: Sequence[str], kept: KeptCodes) -> np.ndarray:
    """Return each item's code: the kept code, or a new code distinct from all kept codes, also of removed items."""
    old = np.array([kept.catalogue.index_of.get(item_id, -1) for item_id in item_ids], dtype=np.int64)
    codes = np.empty((len(item_ids), kept.catalogue.depth), dtype=np.int32)
    codes[old >= 0] = kept.catalogue.codes[old[old >= 0]]
    new = np.flatnonzero(old < 0).tolist()
    codes[new] = kept.book.append([texts[row] for row in new], kept.catalogue.codes)
    return codes
