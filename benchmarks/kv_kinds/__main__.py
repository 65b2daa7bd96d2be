"""The KV cache's data types: their cost in quality and their gain in capacity.

    python -m benchmarks.kv_kinds --bundle PATH --json OUT [--cases FOLDER] [--checkpoint PATH --text FOLDER]

`--bundle` is a published bundle; the test cases come from the newest `tokenize` stage of the state folder it lies in, unless
`--cases` names one. Rankings: each user's ten best, masked, against those of `model`; NDCG and HR on the labels. With
`--checkpoint` (a Hugging Face folder) also: the perplexity of the Markdown files below `--text` (default: docs), and how many
of the ten best a beam of 32 finds again, over a random catalogue of three codes of its vocabulary, after that text.
All in fp32 on plain torch, so that only the KV data type differs.
"""

import argparse
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.kv_kinds.text import overlap_in_beams, perplexity, read_windows
from benchmarks.load.command import command_of, write_report
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from models.prompt import prompt_tokens
from models.registry import BundleStore
from pipelines.data.examples import Cases, Split, read_cases
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig, KvKind
from services.llm.engine.engine import Engine
from services.llm.engine.kv.cache import KvCache

KINDS: tuple[KvKind, ...] = ("model", "int8", "fp8")
_K = 10
_CPU = torch.device("cpu")


def main() -> None:
    """Measure all data types and write them."""
    options = _options()
    torch.set_num_threads(1)
    shown: dict[str, Any] = {
        "command": command_of("kv_kinds"),
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "rankings": _rankings(options.bundle, options.cases or _newest_cases(options.bundle)),
    }
    if options.checkpoint is not None:
        shown["text"] = _text(options.checkpoint, options.text)
    write_report(options.json, shown)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--bundle", type=Path, required=True, metavar="PATH", help="a published bundle")
    parser.add_argument("--cases", type=Path, metavar="FOLDER", help="folder with examples.parquet")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="a Hugging Face folder with its tokenizer.json")
    parser.add_argument("--text", type=Path, metavar="FOLDER", default=Path("docs"), help="folder of Markdown files")
    return parser.parse_args()


def _newest_cases(bundle: Path) -> Path:
    stages = bundle.absolute().parent.parent / "pipeline" / "tokenize"
    found = list(stages.glob("*/"))
    if not found:
        sys.exit(f"error: --bundle: {stages} is empty, so there are no test cases; pass --cases")
    return max(found, key=lambda path: path.stat().st_mtime)


def _rankings(path: Path, tokenized: Path) -> list[dict[str, Any]]:
    bundle = BundleStore(path.absolute().parent).open(path.name)
    catalogue, cases = bundle.catalogue(), read_cases(tokenized, Split.TEST)
    decoder = load_decoder(bundle.decoder_dir, torch.float32, "cpu")
    window = bundle.manifest["prompt"]
    prompts = [
        prompt_tokens(catalogue, past.tolist(), window["max_items"], window["stride"]) for past in cases.histories
    ]
    items = ItemCodes(codes=catalogue.codes, level_sizes=catalogue.level_sizes, token_offsets=catalogue.token_offsets)
    tops = {kind: _tops(decoder, items, kind, prompts, cases) for kind in KINDS}
    return [
        {"kv_kind": kind, "users": len(cases), "depth": catalogue.depth}
        | _quality(top, cases)
        | {"overlap@10": round(float(np.mean([_overlap(a, b) for a, b in zip(top, tops["model"], strict=True)])), 4)}
        | _capacity(decoder, kind)
        for kind, top in tops.items()
    ]


def _tops(decoder: Decoder, items: ItemCodes, kind: KvKind, prompts: list[list[int]], cases: Cases) -> list[np.ndarray]:
    config = EngineConfig(kv_kind=kind, cpu_kernels="torch", num_blocks=256)
    engine = Engine(decoder, config, items=items, bundle_version=kind)
    tops = []
    for user in track(range(len(prompts)), f"rankings, {kind}".ljust(20), console=Console(stderr=True)):
        engine.add_rank(str(user), prompts[user], k=_K, excluded=cases.histories[user])
        while engine.has_work:
            tops += [outcome.item_indices for outcome in engine.step(0.0)]
    return tops


def _quality(tops: list[np.ndarray], cases: Cases) -> dict[str, float]:
    """Return the masked metrics; a label outside the top ten counts 0, as in the full protocol."""
    places = [np.flatnonzero(top == target) for top, target in zip(tops, cases.targets, strict=True)]
    gains = [1 / np.log2(2 + place[0]) if len(place) else 0.0 for place in places]
    return {
        "ndcg@10": round(float(np.mean(gains)), 5),
        "hr@10": round(float(np.mean([len(place) > 0 for place in places])), 5),
    }


def _overlap(top: np.ndarray, wanted: np.ndarray) -> float:
    return len(np.intersect1d(top, wanted)) / len(wanted)


def _capacity(decoder: Decoder, kind: KvKind) -> dict[str, float]:
    """Return one token's bytes in all layers, and the ratio to fp32 and bf16 caches."""
    sizes = {
        dtype: KvCache(decoder.config, 1, 16, dtype, _CPU, kind).bytes_per_token
        for dtype in (torch.float32, torch.bfloat16)
    }
    plain = {dtype: KvCache(decoder.config, 1, 16, dtype, _CPU).bytes_per_token for dtype in sizes}
    return {
        "bytes_per_token": sizes[torch.bfloat16],
        "tokens_per_byte_to_fp32": round(plain[torch.float32] / sizes[torch.float32], 3),
        "tokens_per_byte_to_bf16": round(plain[torch.bfloat16] / sizes[torch.bfloat16], 3),
    }


def _text(checkpoint: Path, folder: Path) -> dict[str, Any]:
    decoder = load_decoder(checkpoint, torch.float32, "cpu")
    windows = read_windows(checkpoint / "tokenizer.json", folder)
    exact = None
    rows = []
    for kind in KINDS:
        tops = overlap_in_beams(decoder, kind, windows)
        exact = exact if exact is not None else tops
        overlap = float(np.mean([_overlap(a, b) for a, b in zip(tops, exact, strict=True)]))
        rows.append(
            {"kv_kind": kind, "perplexity": round(perplexity(decoder, kind, windows), 4)}
            | {"beam_overlap@10": round(overlap, 4)}
            | _capacity(decoder, kind)
        )
    return {
        "checkpoint": checkpoint.name,
        "text": str(folder),
        "tokens": sum(len(window) for window in windows),
        "window_tokens": len(windows[0]),
        "kinds": rows,
    }


if __name__ == "__main__":
    main()
