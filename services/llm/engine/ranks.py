"""Tensor parallelism: one engine's decoder over several processes of a machine (Shoeybi et al. 2019, Megatron-LM).

Rank 0 runs the engine. It writes each step's plan to its followers' standard input, then all ranks compute the step on
their shard of each layer, with two all-reduces a layer. Embedding and head are whole on every rank, so all ranks select
the same beams; only rank 0 samples text. Scheduler, block pool and plan do not know of ranks. A follower that ends or
hangs fails the next all-reduce, which fails the engine: the replica restarts with new ranks.
"""

import contextlib
import copy
import logging
import pickle
import select
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.layer import Projection, rows_of
from models.decoder.weights import load_decoder
from services.errors import ConfigError
from services.llm.engine.beam.item_mask import RankWork
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.plan import Chunk, StepPlan
from services.llm.engine.sequence import Sequence

_log = logging.getLogger(__name__)
_START_S = 600.0
"""Maximum time for a follower to load the decoder."""
READY = b"ready\n"
_ROOT = Path(__file__).parents[3]


def check_layout(config: DecoderConfig, num_ranks: int) -> None:
    """Reject a number of ranks that does not divide the heads or the feed-forward layer. Raises ConfigError."""
    if not _divides(config, num_ranks):
        sizes = [number for number in range(1, config.num_attention_heads + 1) if _divides(config, number)]
        raise ConfigError(
            f"tensor_parallel_size: {num_ranks} does not divide {config.num_attention_heads} query heads, "
            f"{config.num_key_value_heads} key heads and {config.intermediate_size} feed-forward numbers; "
            f"set it to {' or '.join(map(str, sizes))}"
        )


def _divides(config: DecoderConfig, number: int) -> bool:
    """Key heads may also be replicated, if the ranks are a multiple of them."""
    is_even = config.num_attention_heads % number == config.intermediate_size % number == 0
    return is_even and (config.num_key_value_heads % number == 0 or number % config.num_key_value_heads == 0)


def shard_of(decoder: Decoder, rank: int, num_ranks: int) -> Decoder:
    """Return one rank's part of a decoder, which is a decoder with fewer heads and a narrower feed-forward layer.

    Rows of q, k, v, gate and up, and columns of output and down, are divided, whole heads together. Rank 0 adds the
    biases after the sum. Tables and norms are shared.
    """
    whole = decoder.config
    config = replace(
        whole,
        num_attention_heads=whole.num_attention_heads // num_ranks,
        num_key_value_heads=max(1, whole.num_key_value_heads // num_ranks),
        intermediate_size=whole.intermediate_size // num_ranks,
    )
    state = decoder.state_dict()
    for row in rows_of(whole):
        if not isinstance(row, Projection):
            continue
        dim = int(row.rows(whole) == row.rows(config))  # output and down are divided along their columns
        size = (row.rows, row.columns)[dim]
        unit = 1 if row.matrix in ("gate_up", "down") else whole.head_dim
        start, length = rank * (size(whole) // unit) // num_ranks * unit, size(config)
        for layer in range(whole.num_hidden_layers):
            name = f"layers.{layer}.{row.name}"
            state[f"{name}.weight"] = state[f"{name}.weight"].narrow(dim, start, length).clone()
            if (bias := state.get(f"{name}.bias")) is not None:
                state[f"{name}.bias"] = bias * (rank == 0) if dim else bias.narrow(0, start, length).clone()
    with torch.device("meta"):
        part = Decoder(config)
    part.load_state_dict(state, assign=True)
    return part.eval().requires_grad_(False)


def load_part(
    folder: Path, dtype: torch.dtype, device: str, config: EngineConfig, *, with_adapter: bool = True
) -> tuple[Decoder, EngineConfig]:
    """Load a decoder, or rank 0's shard of it. Returns it with the configuration of its engine.

    Raises CheckpointError, or ConfigError if the number of ranks or the weight kind does not suit it.
    """
    number = config.tensor_parallel_size
    if number == 1:
        return load_decoder(folder, dtype, device, with_adapter=with_adapter), config
    if config.weight_kind != "model":
        raise ConfigError(f"weight_kind: {config.weight_kind} runs on one rank; set it to model")
    decoder = load_decoder(folder, dtype, "cpu")
    check_layout(decoder.config, number)
    _warn_if_one_holds_it(decoder, device, number)
    return shard_of(decoder, 0, number).to(device), replace(config, cpu_kernels="torch")


def _warn_if_one_holds_it(decoder: Decoder, device: str, num_ranks: int) -> None:
    num_bytes = sum(weight.numel() * weight.element_size() for weight in decoder.parameters())
    free = torch.cuda.mem_get_info(torch.device(device))[0] if device != "cpu" else 2 * num_bytes
    if num_bytes <= free / 2:
        _log.warning(
            "one device holds the decoder (%.1f GB), so %d replicas answer more requests than %d ranks; "
            "`tailrace plan model --serve` compares them",
            num_bytes / 1e9,
            num_ranks,
            num_ranks,
        )


def start_ranks(
    folder: Path, dtype: torch.dtype, device: str, config: EngineConfig, items: ItemCodes | None
) -> "LeadRank | None":
    """Start the other ranks of an engine; None if it has one rank. Raises ConfigError."""
    return LeadRank(folder, dtype, device, config, items) if config.tensor_parallel_size > 1 else None


class EngineRanks:
    """A rank's connection to all other ranks: all-reduces, and their bytes."""

    def __init__(self, meeting: Path, rank: int, num_ranks: int, timeout_s: float, device: torch.device) -> None:
        store, timeout = dist.FileStore(str(meeting), num_ranks), timedelta(seconds=timeout_s)  # type: ignore[attr-defined]
        self.rank, self.num_ranks = rank, num_ranks
        self.bytes_sent = 0.0
        """Bytes that a ring all-reduce sends from this rank, summed over all calls."""
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, num_ranks, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, num_ranks, timeout)

    def reduce(self, part_TD: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, the same bits on each rank. Raises RuntimeError if a rank is lost."""
        self._group.allreduce([part_TD]).wait()
        self.bytes_sent += all_reduce_bytes(part_TD.numel() * part_TD.element_size(), self.num_ranks)
        return part_TD


def all_reduce_bytes(num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of this many bytes."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerStart:
    """The arguments with which a follower builds its part of an engine."""

    folder: Path
    dtype: torch.dtype
    device: str
    rank: int
    meeting: Path
    config: EngineConfig
    items: ItemCodes | None


class LeadRank(EngineRanks):
    """Rank 0: starts the followers and sends them the plans."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: str, config: EngineConfig, items: ItemCodes | None
    ) -> None:
        """Start the followers. Raises ConfigError if one ends or does not load the decoder in time."""
        number, own = config.tensor_parallel_size, torch.device(device)
        home = tempfile.TemporaryDirectory(prefix="tailrace-ranks-")
        start = FollowerStart(
            folder=folder.resolve(),
            dtype=dtype,
            device=device,
            rank=0,
            meeting=Path(home.name) / "meeting",
            config=config,
            items=items,
        )
        command = [sys.executable, "-m", "services.llm.engine.follower"]
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT)
            for _ in range(1, number)
        ]
        self._end = weakref.finalize(self, _end, self.processes, home)
        for rank, process in enumerate(self.processes, start=1):
            where = f"cuda:{(own.index or 0) + rank}" if own.type == "cuda" else device
            _write(process, replace(start, rank=rank, device=where))
        for process in self.processes:
            _wait_until_ready(process)
        self._beams: dict[int, Sequence] = {}
        super().__init__(start.meeting, 0, number, config.rank_timeout_s, own)

    def send(self, plan: StepPlan) -> None:
        """Send a step that is about to run, and the rankings that ended. Raises OSError if a follower has ended."""
        ended = [order for order, sequence in self._beams.items() if sequence.has_ended]
        self._beams |= {sequence.order: sequence for sequence in plan.sequences if sequence.num_levels}
        for order in ended:
            del self._beams[order]
        message = (_portable(plan), ended)
        for process in self.processes:
            _write(process, message)

    def stop(self) -> None:
        self._end()


def _write(process: "subprocess.Popen[bytes]", message: object) -> None:
    stream = cast("BinaryIO", process.stdin)
    stream.write(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
    stream.flush()


def _wait_until_ready(process: "subprocess.Popen[bytes]") -> None:
    stream = cast("BinaryIO", process.stdout)
    is_readable = bool(select.select([stream], [], [], _START_S)[0])
    if not (is_readable and stream.readline() == READY):
        raise ConfigError("tensor_parallel_size: a rank did not start; see its error above")


def _end(processes: Many["subprocess.Popen[bytes]"], home: "tempfile.TemporaryDirectory[str]") -> None:
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # unsent bytes to an ended process
                cast("BinaryIO", stream).close()
    home.cleanup()


def _portable(plan: StepPlan) -> StepPlan:
    """Return the plan with only those parts of its sequences that a follower needs."""
    parts = {sequence: _portable_sequence(sequence) for sequence in plan.sequences}
    chunks = [Chunk(parts[chunk.sequence], chunk.start, chunk.num_tokens) for chunk in plan.chunks]
    return StepPlan(chunks, [parts[sequence] for sequence in plan.beam_steps])


def _portable_sequence(sequence: Sequence) -> Sequence:
    part = copy.copy(sequence)
    part.work = sequence.work.to("cpu") if isinstance(sequence.work, RankWork) else None
    part.leader = part.beams = None
    part.generated, part.block_hashes, part.draft_masks = [], [], ()
    return part
