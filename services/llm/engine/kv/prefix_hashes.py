"""The names of cached blocks: a chain of hashes over the bundle version and all tokens up to a block's end.

Equal names mean equal tokens at equal positions under equal weights, so a block can be shared by name alone. The hash
is a cryptographic one: a collision would serve one user's context to another.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


class PrefixHasher:
    """Names the full blocks of token sequences for one version of the weights."""

    def __init__(self, bundle_version: str, block_tokens: int) -> None:
        self._root = hashlib.blake2b(bundle_version.encode(), digest_size=16).digest()
        self._block_tokens = block_tokens

    def extend(self, names: list[bytes], tokens: Sequence[int]) -> None:
        """Append to `names` those of the blocks that `tokens` fill and that have none yet."""
        size = self._block_tokens
        first = len(names) * size
        flat = np.asarray(tokens[first : len(tokens) // size * size], dtype=np.int32).tobytes()
        parent = names[-1] if names else self._root
        for start in range(0, len(flat), 4 * size):
            parent = hashlib.blake2b(parent + flat[start : start + 4 * size], digest_size=16).digest()
            names.append(parent)
