"""The axis `codes`: codes of depth 3 for this many items of synthetic embeddings, grouped and unequal, as a process of its own.

python -m benchmarks.scale.codes N
"""

import json
import resource
import sys
import time

import numpy as np

from pipelines.codes.code_book import describe, make_codes
from pipelines.codes.options import CodesOptions

_SIZE = 128
_GROUPS = 2_000
_DEPTH = 3


def main() -> None:
    """Code the items and print time, memory, and how good the codes are."""
    num_items = int(sys.argv[1])
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(_GROUPS, _SIZE)).astype(np.float32)
    shares = 1 / np.arange(1, _GROUPS + 1)
    groups = rng.choice(_GROUPS, num_items, p=shares / shares.sum())
    embeddings = centres[groups] + rng.normal(size=(num_items, _SIZE)).astype(np.float32)
    began = time.perf_counter()
    levels, codes = make_codes(embeddings, CodesOptions().level_size(num_items, _DEPTH), _DEPTH, 0)
    spent_s = time.perf_counter() - began
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
    found = describe(codes, [len(level.prices_S) for level in levels])
    print(json.dumps({"size": num_items, "seconds": round(spent_s, 1), "rss_mb": round(rss_mb, 1), **found}))


if __name__ == "__main__":
    main()
