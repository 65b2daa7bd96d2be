"""The code book, one file of the bundle: the encoder of items and the codes of all levels. Learned once.

code_book.safetensors   rarity, text, use (embedding.py); centroids.L and prices.L of each level
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pipelines.codes.embedding import HashedTextEncoder, ItemEncoder, fit_encoder
from pipelines.codes.options import CodesOptions
from pipelines.codes.paths import place
from pipelines.codes.quantizer import CodeLevel, fit_level
from services.errors import BundleCorrupt

CODE_BOOK = "code_book.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class CodeBook:
    """The encoder and the levels of codes, the first level first."""

    encoder: ItemEncoder
    levels: tuple[CodeLevel, ...]

    @property
    def level_sizes(self) -> tuple[int, ...]:
        return tuple(len(level.prices_S) for level in self.levels)

    def append(self, texts: Sequence[str], taken: np.ndarray) -> np.ndarray:
        """Return codes (N, depth) for new items from their texts. The `taken` codes stay as they are."""
        return place(self.levels, self.encoder.encode(texts), taken)

    def save(self, path: Path) -> None:
        """Write the file."""
        encoder = self.encoder
        tensors = {"rarity": encoder.text.rarity_W, "text": encoder.text.text_WT, "use": encoder.use_TU}
        for number, level in enumerate(self.levels):
            tensors |= {f"centroids.{number}": level.centroids_SD, f"prices.{number}": level.prices_S}
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)


def load_code_book(path: Path) -> CodeBook:
    """Read what `save` wrote. Raises BundleCorrupt."""
    try:
        tensors = load_file(path)
        depth = sum(name.startswith("prices.") for name in tensors)
        levels = tuple(CodeLevel(tensors[f"centroids.{level}"], tensors[f"prices.{level}"]) for level in range(depth))
        text = HashedTextEncoder(tensors["rarity"], tensors["text"])
        return CodeBook(ItemEncoder(text, tensors["use"]), levels)
    except (OSError, KeyError, SafetensorError) as error:
        raise BundleCorrupt(f"{path}: not a code book ({error})") from error


def make_code_book(
    texts: Sequence[str], sequences: Sequence[np.ndarray], depth: int, options: CodesOptions
) -> tuple[CodeBook, np.ndarray]:
    """Learn a code book from items and training events, and return it with the items' codes (N, depth)."""
    encoder, embeddings_ND = fit_encoder(texts, sequences, options.embedding_size, options.seed)
    size = options.level_size(len(texts), depth)
    levels, codes = make_codes(embeddings_ND, size, depth, options.seed)
    return CodeBook(encoder, levels), codes


def make_codes(embeddings_ND: np.ndarray, size: int, depth: int, seed: int) -> tuple[tuple[CodeLevel, ...], np.ndarray]:
    """Learn levels of this many codes each from embeddings, and place the items."""
    levels: list[CodeLevel] = []
    residuals_ND = embeddings_ND
    for number in range(depth):
        level = fit_level(residuals_ND, min(size, len(embeddings_ND)), seed + number)
        levels.append(level)
        if number < depth - 1:
            residuals_ND = level.leave(residuals_ND, level.assign(residuals_ND))
    return tuple(levels), place(levels, embeddings_ND, np.zeros((0, depth), dtype=np.int32))


def describe(codes: np.ndarray, level_sizes: Sequence[int]) -> dict[str, Any]:
    """Return balance, unused codes and collisions; balance is by level the size of the largest code over the mean."""
    levels = []
    for number, size in enumerate(level_sizes):
        loads = np.bincount(codes[:, number], minlength=size)
        share = len(codes) / size
        shares = loads / len(codes)
        entropy = float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum() / np.log(max(2, size)))
        levels.append(
            {
                "size": size,
                "dead": int((loads == 0).sum()),
                "fullest_to_mean": float(loads.max() / share),
                "entropy_share": entropy,
            }
        )
    shared = len(codes) - len(np.unique(codes[:, :-1], axis=0)) if codes.shape[1] > 1 else 0
    return {
        "levels": levels,
        "collisions_before_last_level": shared,
        "collisions": len(codes) - len(np.unique(codes, axis=0)),
    }
