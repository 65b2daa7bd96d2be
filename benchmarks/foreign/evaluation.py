"""MiniOneRec's own `evaluate.py`, unmodified, from a checkout, on the folder and the test rows of this comparison.

It loads the checkpoint in bf16 and pads prompts in batches of eight. Its answers stay in the folder, since they take
longer than all else. Its packages (fire, accelerate, bitsandbytes, pandas) come from PYTHONPATH. It holds answers to
the catalogue only if "### Response:" and its newline are three tokens, or four in a folder with "gpt2" in its name, so
a link has the right name.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.foreign.oracle import framework_metrics
from pipelines.foreign.measure import CUTOFFS

_ANSWERS, _ITEMS, _ROWS = "evaluate.json", "info.txt", "rows.csv"
_LINKS = {3: "model", 4: "model-gpt2"}
"""Names of the checkpoint by the tokens of `_PREFIX`."""
_PREFIX = "### Response:\n"
_TOKENIZER: Any = AutoTokenizer


def evaluate(checkout: Path, folder: Path, num_beams: int) -> list[list[str]]:
    """Return the script's list of codes, as text, for each test row."""
    folder = folder.resolve()
    if not (folder / _ANSWERS).exists():
        _write_inputs(folder)
        given: dict[str, Any] = {
            "base_model": _checkpoint(folder),
            "info_file": folder / _ITEMS,
            "category": "Office_Products",
            "test_data_path": folder / _ROWS,
            "result_json_data": folder / _ANSWERS,
            "batch_size": 8,
            "num_beams": num_beams,
            "length_penalty": 0.0,
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "evaluate.py", *words], cwd=checkout, check=True)
    answers = json.loads((folder / _ANSWERS).read_text())
    return [[code.strip() for code in row["predict"]] for row in answers]


def evaluation_report(theirs: list[list[str]], ours: list[list[str]], labels: list[str]) -> dict[str, Any]:
    """Return HR and NDCG of the script's lists, and how far ours agree with their first ten positions."""
    metrics: dict[str, float] = {}
    for cutoff in CUTOFFS:
        metrics[f"hr@{cutoff}"], metrics[f"ndcg@{cutoff}"] = framework_metrics(theirs, labels, cutoff)
    tops = [(expected[:10], other[:10]) for expected, other in zip(theirs, ours, strict=True)]
    equal = [code == own for expected, other in tops for code, own in zip(expected, other, strict=True)]
    shared = [len(set(expected) & set(other)) / len(expected) for expected, other in tops]
    return metrics | {"equal_positions": sum(equal) / len(equal), "shared_items": sum(shared) / len(shared)}


def _checkpoint(folder: Path) -> Path:
    """Return the checkpoint under a name that makes the script read its prefix rightly."""
    num_tokens = len(_TOKENIZER.from_pretrained(folder / "model")(_PREFIX).input_ids)
    if num_tokens not in _LINKS:
        sys.exit(f"{folder / 'model'}: {_PREFIX!r} has {num_tokens} tokens; evaluate.py reads 3 or 4")
    link = folder / _LINKS[num_tokens]
    if not link.exists():
        link.symlink_to("model")
    return link


def _write_inputs(folder: Path) -> None:
    """Write the items as `code, title, number`, and the rows with a number, without which pandas passes lists on."""
    sids = json.loads((folder / "index.json").read_text())
    lines = [f"{''.join(sid)}\ttitle {number}\t{number}" for number, sid in enumerate(sids.values(), start=1)]
    (folder / _ITEMS).write_text("\n".join(lines))
    with (folder / "test.csv").open() as read, (folder / _ROWS).open("w", newline="") as written:
        rows = list(csv.DictReader(read))
        writer = csv.DictWriter(written, [*rows[0], "row"])
        writer.writeheader()
        writer.writerows({**row, "row": number} for number, row in enumerate(rows))
