"""Turns short texts into unit vectors, with ONNX Runtime: texts of similar meaning have similar vectors.

    encoder.onnx      inputs `ids` and `mask` (B, L) int64, output `vectors` (B, D) float32 of length 1
    tokenizer.json    of the library `tokenizers`

Both come with the bundle, in its folder `wishes`.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from services.errors import BundleCorrupt

GRAPH, TOKENIZER = "encoder.onnx", "tokenizer.json"
_MAX_TOKENS = 64
_TEXTS_PER_BATCH = 64


class Encoder:
    """An encoder of texts. Thread-safe."""

    def __init__(self, graph: Path, tokenizer: Path, num_threads: int = 1) -> None:
        """Load both files. Each thread encodes batches of its own, so vectors do not depend on `num_threads`."""
        self._num_threads = num_threads
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        self._tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.enable_padding()
        self._tokenizer.enable_truncation(_MAX_TOKENS)

    @property
    def size(self) -> int:
        return int(self._session.get_outputs()[0].shape[1])

    @property
    def words(self) -> list[str]:
        """The tokens of the vocabulary, in order."""
        by_token: dict[str, int] = self._tokenizer.get_vocab()
        return sorted(by_token, key=by_token.__getitem__)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors (N, D) float32 of texts."""
        vectors_ND = np.zeros((len(texts), self.size), dtype=np.float32)
        by_length = np.argsort([len(text) for text in texts], kind="stable")
        starts = range(0, len(texts), _TEXTS_PER_BATCH)
        batches = [by_length[start : start + _TEXTS_PER_BATCH] for start in starts]

        def fill(rows: np.ndarray) -> None:
            vectors_ND[rows] = self._encode_batch([texts[row] for row in rows])

        with ThreadPoolExecutor(self._num_threads) as threads:
            fill_each = map if min(self._num_threads, len(batches)) <= 1 else threads.map
            for _ in fill_each(fill, batches):
                pass
        return vectors_ND

    def _encode_batch(self, texts: Sequence[str]) -> np.ndarray:
        encoded = self._tokenizer.encode_batch(texts)
        feed = {
            "ids": np.array([encoding.ids for encoding in encoded], dtype=np.int64),
            "mask": np.array([encoding.attention_mask for encoding in encoded], dtype=np.int64),
        }
        vectors_BD: np.ndarray = self._session.run(None, feed)[0]
        return vectors_BD


def load_encoder(folder: Path, num_threads: int = 1) -> Encoder | None:
    """Return the encoder of a reader's folder; None in a folder without one. Raises BundleCorrupt."""
    if not (folder / GRAPH).exists():
        return None
    try:
        return Encoder(folder / GRAPH, folder / TOKENIZER, num_threads)
    except Exception as error:
        raise BundleCorrupt(f"{folder / GRAPH}: not an encoder ({str(error)[:200]})") from error
