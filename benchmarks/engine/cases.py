"""The benchmark's cases, their prompts and the catalogue.

Prompts are new in each run, to avoid prefix cache hits, and the same for all engines.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from models.search import Scores

NUM_LEVELS = 3
NUM_BEST = 10
_MAX_LEVEL_SIZE = 1_024
_MAX_ITEMS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A timed case: `num_new` tokens each after `batch` prompts, or beams of `width` over codes of three levels.

    `lengths`, if given, are the pairs of prompt length and number of new tokens. `scores` are the tokens among which
    beams are normalised. With `is_cached` each run has the same prompts, whose blocks the first run caches.
    """

    name: str
    unit: str
    batch: int
    prompt_len: int
    num_new: int = 0
    width: int = 0
    temperature: float = 0.0
    scores: Scores = "catalogue"
    lengths: tuple[tuple[int, int], ...] = ()
    is_cached: bool = False

    @property
    def amount(self) -> int:
        """Amount of work of one run, in the unit's noun."""
        if self.unit == "prompt tokens/s":
            return self.batch * self.prompt_len
        return sum(self.new_tokens) if self.unit == "output tokens/s" else self.batch

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each prompt."""
        return [prompt_len for prompt_len, _ in self.lengths] or [self.prompt_len] * self.batch

    @property
    def new_tokens(self) -> list[int]:
        """Tokens to write after each prompt."""
        return [num_new for _, num_new in self.lengths] or [self.num_new] * self.batch

    def value(self, seconds: float) -> float:
        """Return the case's figure for a run of this duration."""
        return 1_000 * seconds if self.unit == "ms" else self.amount / seconds

    def ask(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Return the request to an engine process."""
        if self.width:
            best = min(NUM_BEST, self.width)
            about = {"width": self.width, "num_best": best, "scores": self.scores}
            return {"do": "rank", "prompts": prompts} | about
        return {"do": "write", "prompts": prompts, "num_new": self.new_tokens, "temperature": self.temperature}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCases:
    """Cases for our engine only: random weights in the shape of a known model, with their engine configuration.

    `level_size` is the number of codes of each level of the catalogue.
    """

    shape: str
    config: dict[str, int]
    cases: tuple[Case, ...]
    level_size: int = _MAX_LEVEL_SIZE


@dataclass(frozen=True, slots=True, eq=False)
class CodeTable:
    """Items' unique codes (num_items, 3); each level has `level_size` codes, from its `token_offsets` on."""

    codes: np.ndarray
    level_size: int
    token_offsets: tuple[int, ...]


def text_cases() -> tuple[Case, ...]:
    """Return the cases that all engines run."""
    return (
        *(
            Case(name=f"decode-{batch}", unit="output tokens/s", batch=batch, prompt_len=128, num_new=64)
            for batch in (1, 8, 32)
        ),
        Case(name="prefill-16x512", unit="prompt tokens/s", batch=16, prompt_len=512, num_new=1),
        *(
            Case(name=f"beams-{width}", unit="requests/s", batch=1, prompt_len=128, width=width)
            for width in (8, 32, 128)
        ),
    )


def foreign_cases() -> tuple[Case, ...]:
    """Return the cases of a recommender that was trained elsewhere: 50 beams, by both kinds of scores."""
    shape: dict[str, Any] = {"unit": "requests/s", "batch": 1, "prompt_len": 128, "width": 50}
    return Case(name="foreign", scores="vocabulary", **shape), Case(name="foreign-catalogue", **shape)


def foreign_shape_cases(*, tiny: bool = False) -> ShapeCases:
    """Return the cases of OneRec-1.7B as vLLM-GR publishes them: 3 x 8,192 SIDs, a context of 1,024, hit and miss."""
    length, widths = (40, (8, 16)) if tiny else (1_024, (64, 128, 256))
    cases = tuple(
        Case(
            name=f"onerec-1.7b-{scores}-{width}-{'hit' if is_cached else 'miss'}",
            unit="ms",
            batch=1,
            prompt_len=length,
            width=width,
            scores=scores,
            is_cached=is_cached,
        )
        for scores in get_args(Scores)
        for width in widths
        for is_cached in (False, True)
    )
    config = {"max_num_batched_tokens": 8_192, "max_chunk_tokens": 8_192, "max_beam_rows": 2_048, "num_blocks": 4_096}
    shape, level_size = ("tiny", 64) if tiny else ("onerec-1.7b", 8_192)
    return ShapeCases(shape=shape, config=config, cases=cases, level_size=level_size)


PRODUCT = {
    "max_num_batched_tokens": 8_192,
    "max_chunk_tokens": 512,
    "max_beam_rows": 8_192,
    "max_running": 128,
    "max_waiting": 512,
}
"""The engine's limits as the product sets them for a GPU."""


def shape_cases(*, tiny: bool = False, as_product: bool = False) -> tuple[ShapeCases, ...]:
    """Return the cases for a GPU; `tiny` shrinks shape and sizes so that they run anywhere in seconds.

    `as_product` uses the limits of a served engine instead of the best limits of each case.
    """
    wide = {"max_num_batched_tokens": 8_192, "max_chunk_tokens": 8_192, "max_beam_rows": 2_048, "num_blocks": 4_096}
    many = {
        "max_num_batched_tokens": 8_192,
        "max_chunk_tokens": 1_024,
        "max_running": 256,
        "max_waiting": 1_024,
        "num_blocks": 20_480,
    }
    contexts, width, share = ((40, 80), 16, 16) if tiny else ((1_000, 5_000), 256, 1)
    shapes = ("tiny",) * 3 if tiny else ("qwen3-1.7b", "qwen3-0.6b", "llama-3-8b")
    beams = tuple(
        Case(
            name=f"qwen3-1.7b-beams-{width}-context-{length}-batch-{batch}",
            unit="ms",
            batch=batch,
            prompt_len=length,
            width=width,
        )
        for length in contexts
        for batch in (1, 4, 8)
    )
    groups = (
        ShapeCases(shape=shapes[0], config=wide, cases=beams),
        ShapeCases(shape=shapes[1], config=many, cases=(_nano_vllm(share),)),
        ShapeCases(
            shape=shapes[2],
            config={"num_blocks": 256},
            cases=(Case(name="llama-3-8b-decode-1", unit="output tokens/s", batch=1, prompt_len=128, num_new=64),),
        ),
    )
    if not as_product:
        return groups
    return tuple(replace(group, config={"num_blocks": group.config["num_blocks"]} | PRODUCT) for group in groups)


def _nano_vllm(share: int) -> Case:
    """Return nano-vllm's published workload: 256 sequences of 100 to 1,024 tokens in and out, by Python's seed 0.

    `share` 16 is a sixteenth of its sequences and of their lengths.
    """
    draw = random.Random(0)
    prompt_lens = []
    for _ in range(256):
        prompt_lens.append(draw.randint(100, 1_024))
        for _ in range(prompt_lens[-1]):
            draw.randint(0, 10_000)
    lengths = [(prompt_len // share, draw.randint(100, 1_024) // share) for prompt_len in prompt_lens][::share]
    return Case(
        name="nano-vllm-256",
        unit="output tokens/s",
        batch=len(lengths),
        prompt_len=max(prompt_len for prompt_len, _ in lengths),
        temperature=0.6,
        lengths=tuple(lengths),
    )


def draw_prompts(case: Case, words: Sequence[int], run: int) -> list[list[int]]:
    """Cut this run's prompts out of a long text's tokens, or draw them from the vocabulary if `words` is a range."""
    draw = random.Random(f"{case.name}/{0 if case.is_cached else run}")
    if isinstance(words, range):
        return [draw.choices(words, k=length) for length in case.prompt_lens]
    starts = [draw.randrange(len(words) - length) for length in case.prompt_lens]
    return [list(words[start : start + length]) for start, length in zip(starts, case.prompt_lens, strict=True)]


def code_table(vocab_size: int, level_size: int = _MAX_LEVEL_SIZE) -> CodeTable:
    """Draw a catalogue over the last tokens of a vocabulary."""
    size = min(level_size, vocab_size // NUM_LEVELS)
    num_items = min(_MAX_ITEMS, size**NUM_LEVELS // 2)
    codes = np.random.default_rng(0).integers(0, size, (num_items, NUM_LEVELS))
    offsets = tuple(vocab_size - (NUM_LEVELS - level) * size for level in range(NUM_LEVELS))
    return CodeTable(np.unique(codes, axis=0), size, offsets)
