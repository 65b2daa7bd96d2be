"""Block hashes of the prefix cache: a hash chain over the bundle version and all tokens up to a block's end.

Equal hashes mean equal tokens at equal positions under equal weights, so blocks are shared by hash alone. The hash is
cryptographic: a collision would serve one user's context to another.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


class PrefixHasher:
    """Hashes the full blocks of token sequences for one version of the weights."""

    def __init__(self, bundle_version: str, block_tokens: int) -> None:
        self._root = hashlib.blake2b(bundle_version.encode(), digest_size=16).digest()
        self._block_tokens = block_tokens

    def extend(self, hashes: list[bytes], tokens: Sequence[int]) -> None:
        """Append to `hashes` those of further blocks that `tokens` fill."""
        size = self._block_tokens
        first = len(hashes) * size
        flat = np.asarray(tokens[first : len(tokens) // size * size], dtype=np.int32).tobytes()
        parent = hashes[-1] if hashes else self._root
        for start in range(0, len(flat), 4 * size):
            parent = hashlib.blake2b(parent + flat[start : start + 4 * size], digest_size=16).digest()
            hashes.append(parent)
