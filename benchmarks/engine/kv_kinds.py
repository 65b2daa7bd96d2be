"""The KV cache's data types: their cost in quality and their gain in capacity.

    python -m benchmarks.engine kv-kinds --bundle PATH --json OUT

`--bundle` is a published bundle; the test cases come from the newest `tokenize` stage of its state folder. Each user's
ten best items, masked, are compared with the `model` data type's. All runs use fp32 on plain torch, so only the KV data
type differs.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.load.command import about_run, newest_tokens, report_parser, write_report
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from models.prompt import prompt_of
from models.registry import BundleStore
from models.search import search_of
from pipelines.data.examples import Split, read_cases
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig, KvKind
from services.llm.engine.engine import Engine
from services.llm.engine.kv.cache import KvCache

KINDS: tuple[KvKind, ...] = ("model", "int8", "fp8")
_K = 10
_CPU = torch.device("cpu")


def main() -> None:
    """Measure all data types and write them."""
    parser = report_parser(__doc__)
    parser.add_argument("--bundle", type=Path, required=True, metavar="PATH", help="a published bundle")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rankings = _rankings(options.bundle, newest_tokens(options.bundle.absolute().parent.parent))
    write_report(options.json, about_run("engine kv-kinds") | {"rankings": rankings})


def _rankings(path: Path, tokenized: Path) -> list[dict[str, Any]]:
    bundle = BundleStore(path.absolute().parent).open(path.name)
    catalogue, cases = bundle.catalogue(), read_cases(tokenized, Split.TEST)
    decoder = load_decoder(bundle.decoder_dir, torch.float32, "cpu")
    prompt = prompt_of(bundle.manifest, bundle.decoder_dir)
    prompts = [prompt.tokens(catalogue, past.tolist()) for past in cases.histories]
    items = ItemCodes.of(catalogue, search_of(bundle.manifest))
    tops = {kind: _tops(decoder, items, kind, prompts, cases.histories) for kind in KINDS}
    return [
        {"kv_kind": kind, "users": len(cases), "depth": catalogue.depth}
        | {"overlap@10": _overlap(top, tops["model"])}
        | _capacity(decoder, kind)
        for kind, top in tops.items()
    ]


def _tops(
    decoder: Decoder, items: ItemCodes, kind: KvKind, prompts: list[list[int]], histories: Iterable[np.ndarray]
) -> list[np.ndarray]:
    """Return the best ten items after each prompt, excluding the items of its history."""
    config = EngineConfig(kv_kind=kind, cpu_kernels="torch", num_blocks=256)
    engine = Engine(decoder, config, items=items, bundle_version=kind)
    tops = []
    asked = zip(track(prompts, f"rankings, {kind}".ljust(20), console=Console(stderr=True)), histories, strict=True)
    for number, (prompt, history) in enumerate(asked):
        engine.add_rank(str(number), prompt, k=_K, excluded=history)
        while engine.has_work:
            tops += [outcome.item_indices for outcome in engine.step(0.0)]
    return tops


def _overlap(tops: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """Return the mean fraction of the exact items that were found."""
    shares = [len(np.intersect1d(top, wanted)) / len(wanted) for top, wanted in zip(tops, exact, strict=True)]
    return round(float(np.mean(shares)), 4)


def _capacity(decoder: Decoder, kind: KvKind) -> dict[str, float]:
    """Return how many tokens this cache holds in the bytes of a bf16 token."""
    plain, own = (KvCache(decoder.config, 1, 16, torch.bfloat16, _CPU, one).bytes_per_token for one in ("model", kind))
    return {"tokens_per_byte_to_bf16": round(plain / own, 3)}
