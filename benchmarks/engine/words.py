"""Real text to cut prompts from: this repository's own pages in the tokens of a checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.process import ROOT


def words_of(model: Path) -> Sequence[int]:
    """Return the tokens of README and docs, or the range of the vocabulary where the checkpoint has no tokenizer."""
    path = model / "tokenizer.json"
    if not path.exists():
        return range(int(json.loads((model / "config.json").read_text())["vocab_size"]))
    from tokenizers import Tokenizer

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    tokens: list[int] = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    return tokens
