"""The error of the GPU attention kernels against fp32 attention, in bf16 at serving sizes, compared with torch's own.

`python -m tests.support.engine.attention_oracle cuda` prints one line for each case, `cuda 36` for 36 of them, which
cover every pair of values. Needs only torch, triton and numpy. The fp32 reference uses the keys and values in the
cache, so the loss of storing int8 and fp8 is not counted.

Shape suffixes: T rows, H query heads, G key/value heads, K head size, N keys that a request's rows see, B beams.
"""

import argparse
import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.llm.engine.beam.tails import Tails
from services.llm.engine.gpu.attention import TritonAttention
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.plan import StepPlan
from services.llm.engine.sequence import Sequence
from tests.support.engine.attention_shapes import attention_shape
from tests.support.interpreter import multiply_bf16_as_numbers
from tests.support.training.sequences import PLACES, step_of, tails_of

KV_HEADS, BLOCK, NUM_BLOCKS = 2, 16, 96
TALL = 0
"""Replaced by enough rows to fill a program's 128 with their query heads, and some more in a second tile."""
WORK = {
    ("prefill", "whole"): ([(100, TALL)], []),
    ("prefill", "split"): ([(300, TALL), (5, 9)], []),
    ("decode", "whole"): ([(0, 1), (76, 1), (249, 1)], []),
    ("decode", "split"): ([(0, 1), (269, 1), (599, 1)], []),
    ("beams", "whole"): ([], [(200, TALL, 1), (64, 7, 3)]),
    ("beams", "split"): ([], [(420, TALL, 2), (300, 7, 1)]),
}
"""Chunks (start, tokens) and beams (prompt tokens, rows, levels done); a context below two splits'
length stays whole.
"""

MOST_ON_A_CARD, MOST_INTERPRETED = 0.01, 0.02
"""The largest relative error of a row. bf16 has steps of 1/128; the interpreter truncates where a card rounds.

Of 300 keys, a missing or superfluous key makes an error of 0.06.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of cache, a kind of work, and a shape of heads."""

    kv_kind: str
    work: str
    parts: str
    heads_per_group: int
    head_dim: int

    def __str__(self) -> str:
        """Name the case."""
        return f"{self.kv_kind}-{self.work}-{self.parts}-{self.heads_per_group}:1-{self.head_dim}"


CASES = [
    Case(*case)
    for case in itertools.product(
        ("model", "int8", "fp8"), ("prefill", "decode", "beams"), ("whole", "split"), (1, 2, 4, 7), (64, 128)
    )
]


def deviations(case: Case, device: torch.device, *, beside_torch: bool = False) -> tuple[float, float]:
    """Return the largest relative error of a head's row, of our kernels and (else 0) of torch's attention in bf16."""
    torch.manual_seed(0)
    plan, cache = _plan_of(case), _cache_of(case, device)
    heads = KV_HEADS * case.heads_per_group
    rows = plan.num_batched_tokens + sum(sequence.num_beam_rows for sequence in plan.beam_steps)
    q_THK = torch.randn(rows, heads, case.head_dim, device=device).bfloat16()
    tails = tails_of(plan, 1, KV_HEADS, case.head_dim, device, torch.bfloat16)
    kernel = TritonAttention(heads, KV_HEADS, BLOCK, device)
    prepared = kernel.prepare(plan)
    assert (prepared.num_splits > 1) == (case.parts == "split"), "the case is not what its name says"

    out_THK = kernel.attend(q_THK, cache, 0, prepared, tails)

    wanted_THK = _dense(q_THK, cache, plan, tails, torch.float32)
    theirs = _worst(_dense(q_THK, cache, plan, tails, torch.bfloat16), wanted_THK) if beside_torch else 0.0
    return _worst(out_THK, wanted_THK), theirs


def _cache_of(case: Case, device: torch.device) -> KvCache:
    config = attention_shape(KV_HEADS, KV_HEADS, case.head_dim, layers=1)
    cache = KvCache(config, NUM_BLOCKS, BLOCK, torch.bfloat16, device, case.kv_kind)
    numbers = torch.randn(2, NUM_BLOCKS * BLOCK, KV_HEADS, case.head_dim, device=device).bfloat16()
    cache.write(0, torch.arange(NUM_BLOCKS * BLOCK, device=device), *numbers)
    return cache


def _plan_of(case: Case) -> StepPlan:
    chunks, beams = WORK[case.work, case.parts]
    tall = 128 // case.heads_per_group + 5
    return step_of(
        [(start, count or tall) for start, count in chunks],
        [(length, rows or tall, levels_done) for length, rows, levels_done in beams],
        block_tokens=BLOCK,
        num_blocks=NUM_BLOCKS,
    )


def _dense(q_THK: Tensor, cache: KvCache, plan: StepPlan, tails: Tails | None, dtype: torch.dtype) -> Tensor:
    """Attend request by request over gathered keys and values, with torch's attention in this dtype."""
    parts, row, beam = [], 0, 0
    for chunk in plan.chunks:
        k_NGK, v_NGK = _context(cache, chunk.sequence, chunk.end)
        seen_TN = torch.arange(chunk.end)[None, :] <= torch.arange(chunk.start, chunk.end)[:, None]
        rows_THK = q_THK[row : row + chunk.num_tokens]
        parts.append(_attend(rows_THK[None], k_NGK[None], v_NGK[None], seen_TN[None], dtype)[0])
        row += chunk.num_tokens
    for sequence in plan.beam_steps:
        assert tails is not None, "beams have tails"
        of_request = slice(beam, beam + sequence.num_beam_rows)
        seen_BL = tails.seen_BL[of_request]
        k_BNGK, v_BNGK = (
            torch.cat((whole.expand(len(seen_BL), *whole.shape), tail_YBLGK[0, of_request].float()), dim=1)
            for whole, tail_YBLGK in zip(
                _context(cache, sequence, sequence.num_computed_tokens),
                (tails.keys_YBLGK, tails.values_YBLGK),
                strict=True,
            )
        )
        seen_BN = functional.pad(seen_BL, (k_BNGK.shape[1] - PLACES, 0), value=True)
        parts.append(
            _attend(q_THK[row : row + len(seen_BL), None], k_BNGK, v_BNGK, seen_BN[:, None], dtype).flatten(0, 1)
        )
        row, beam = row + len(seen_BL), beam + len(seen_BL)
    return torch.cat(parts)


def _context(cache: KvCache, sequence: Sequence, length: int) -> tuple[Tensor, Tensor]:
    blocks_EN = torch.tensor([sequence.block_table], device=cache.slots(0).keys.device)
    k_ENGK, v_ENGK = cache.read(0, blocks_EN)
    return k_ENGK[0, :length].float(), v_ENGK[0, :length].float()


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Attend in a batch of (rows, heads, K) over (keys, heads, K), with a visibility mask per row."""
    q, k, v = (x.to(dtype).transpose(-2, -3) for x in (q, k, v))
    mask = seen.to(q.device).unsqueeze(-3)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(-2, -3).float()


def _worst(found_THK: Tensor, wanted_THK: Tensor) -> float:
    error_TH = (found_THK.float() - wanted_THK).norm(dim=-1) / wanted_THK.norm(dim=-1)
    return float(error_TH.max())  # NaN anywhere stays NaN, which fails every bound


def most(device: torch.device) -> float:
    return MOST_ON_A_CARD if device.type == "cuda" else MOST_INTERPRETED


def sample(number: int) -> list[Case]:
    """Return this number of cases; the first cases cover the most pairs of values."""
    left, chosen, covered = list(CASES), list[Case](), set[object]()
    while left and len(chosen) < number:
        best = max(left, key=lambda case: len(_pairs(case) - covered))
        left.remove(best)
        chosen.append(best)
        covered |= _pairs(best)
        covered = covered if any(_pairs(case) - covered for case in left) else set()
    return chosen


def _pairs(case: Case) -> set[object]:
    return set(itertools.combinations([(field.name, getattr(case, field.name)) for field in fields(case)], 2))


def checked(case: Case, name: str) -> dict[str, Any]:
    """Return a case's row; an error becomes a row too."""
    device = torch.device(name)
    multiply_bf16_as_numbers()
    try:
        ours, theirs = deviations(case, device, beside_torch=device.type == "cuda")
    except Exception as error:  # noqa: BLE001 - one case's failure costs no other's result
        return {"case": str(case), "is_right": False, "error": f"{type(error).__name__}: {error}"}
    return {"case": str(case), "is_right": ours <= most(device), "ours": ours, "torch": theirs}


def main() -> None:
    """Print the cases' errors as they come. Exits with 1 if an error exceeds its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("number", type=int, nargs="?", default=len(CASES))
    parser.add_argument(
        "--processes", type=int, default=1, help="among which the cases, and so the compilation, are divided"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [case for case in sample(options.number) if not (case.kv_kind == "fp8" and lacks_fp8(options.device))]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(checked, case, options.device) for case in cases]):
            rows.append(done.result())
            shown = rows[-1].get("error") or f"ours {rows[-1]['ours']:.5f} torch {rows[-1]['torch']:.5f}"
            print(f"{'ok   ' if rows[-1]['is_right'] else 'WRONG'} {rows[-1]['case']:32} {shown}", flush=True)  # noqa: T201
            if options.json is not None:
                options.json.write_text(json.dumps({"cases": rows}, indent=1) + "\n")
    sys.exit(any(not row["is_right"] for row in rows))


def lacks_fp8(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability() < (8, 9)


if __name__ == "__main__":
    main()
