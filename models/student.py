"""The student: a ranker cheap enough to run for every request, in one pass from a history to the scores of all items.

In serving, only the newest position has a query. Its state starts as the newest item's embedding and is refined in a
few hops; each hop attends over the embeddings of the history, with a learned bias for recency, followed by a small
feed-forward layer. Keys and values come from the items and their direct predecessors, never from earlier hops, so the
work per position is two projections. In training every position has a query and sees only the positions before it.

It is independent of item codes: embedding row 0 is the beginning of a history, row 1 + i is item i.

Shape suffixes: B histories, L positions (the beginning is position 0), H heads, K head size, D hidden, F feed-forward,
V items.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from models.documents import Count, Finite, decode
from models.errors import BundleCorrupt

_Size = Annotated[int, Field(ge=1, le=2**40)]
START = 0
"""Input row of the beginning of a history; item i is row i + 1."""
MAX_SCORED_WHOLE = 20_000
"""The served student scores all items of a catalogue of this size; a larger catalogue has an item table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentConfig:
    """The shape of a student. `max_items` is the number of newest items that it reads."""

    num_items: _Size
    hidden_size: _Size
    feed_forward: _Size
    num_heads: _Size
    num_hops: Count
    max_items: _Size
    norm_eps: Finite = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Hop(nn.Module):
    """Attention over the history from each position's state, and a feed-forward layer."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.norm = nn.RMSNorm(size, eps=config.norm_eps)
        self.query = nn.Linear(size, size, bias=False)
        self.key = nn.Linear(size, size, bias=False)
        self.value = nn.Linear(size, size, bias=False)
        self.output = nn.Linear(size, size, bias=False)
        self.recency_HL = nn.Parameter(_first_recency(config))
        self.norm_forward = nn.RMSNorm(size, eps=config.norm_eps)
        self.up = nn.Linear(size, config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, size, bias=False)

    def forward(self, state_BLD: Tensor, memory_BLD: Tensor, steps_back_LL: Tensor) -> Tensor:
        """Refine each position's state from the memory up to its position. (B, L, D) -> (B, L, D)."""
        q_BHLK, k_BHLK, v_BHLK = (
            projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projected in (self.query(self.norm(state_BLD)), self.key(memory_BLD), self.value(memory_BLD))
        )
        scores_BHLL = q_BHLK @ k_BHLK.transpose(-1, -2) * q_BHLK.shape[-1] ** -0.5
        recency_HLL = self.recency_HL[:, steps_back_LL.clamp(min=0)].masked_fill(steps_back_LL < 0, -torch.inf)
        seen_BHLK = (scores_BHLL + recency_HLL).softmax(-1) @ v_BHLK
        state_BLD = state_BLD + self.output(seen_BHLK.transpose(1, 2).flatten(-2))
        refined: Tensor = state_BLD + self.down(functional.silu(self.up(self.norm_forward(state_BLD))))
        return refined


class StudentModel(nn.Module):
    """Embedding, hops, and scores against the same embedding."""

    def __init__(self, config: StudentConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(1 + config.num_items, config.hidden_size)
        self.carry_D = nn.Parameter(torch.zeros(config.hidden_size))
        self.norm_memory = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.hops = nn.ModuleList(Hop(config) for _ in range(config.num_hops))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    @property
    def head_weight_VD(self) -> Tensor:
        """The output matrix, by item index."""
        return self.embedding.weight[1:]

    def forward(self, rows_BL: Tensor) -> Tensor:
        """Return each position's final state. Embedding rows (B, L), oldest first, START at position 0 -> (B, L, D)."""
        embedded_BLD = self.embedding(rows_BL)
        before_BLD = functional.pad(embedded_BLD, (0, 0, 1, 0))[:, :-1]
        memory_BLD = self.norm_memory(embedded_BLD + self.carry_D * before_BLD)
        position_L = torch.arange(rows_BL.shape[1], device=rows_BL.device)
        steps_back_LL = position_L.unsqueeze(1) - position_L
        state_BLD = embedded_BLD
        for hop in self.hops:
            state_BLD = hop(state_BLD, memory_BLD, steps_back_LL)
        final: Tensor = self.norm(state_BLD)
        return final


def _first_recency(config: StudentConfig) -> Tensor:
    """Return initial recency biases that differ by head: from almost no decay over the past to a strong one."""
    steps_back_L = torch.arange(1 + config.max_items, dtype=torch.float32)
    decay_H = torch.linspace(0.25, 2.0, config.num_heads)
    return -decay_H.unsqueeze(1) * steps_back_L.log1p()


def save_student(student: StudentModel, path: Path) -> None:
    """Write weights and shape into one safetensors file."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in student.state_dict().items()}
    save_file(tensors, path, metadata={"config": json.dumps(asdict(student.config))})


def read_student(path: Path) -> StudentModel:
    """Read a student that `save_student` wrote, ready for inference. Raises BundleCorrupt."""
    try:
        with safe_open(path, framework="pt") as file:
            config, _ = decode((file.metadata() or {}).get("config", ""), StudentConfig, f"{path}: config")
            with torch.device("meta"):  # sizes claimed by the file allocate no memory
                student = StudentModel(config)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        student.load_state_dict(tensors, assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise BundleCorrupt(f"{path}: not the weights of a student ({str(error)[:500]})") from error
    return student.eval()
