"""A rank that only computes: `python -m services.llm.engine.follower`, started by `LeadRank`.

It loads its shard, then runs each plan from its standard input until that ends. Between steps it keeps only the beams
of rankings, which its own steps have selected.
"""

import pickle
import sys
from typing import cast

import torch

from models.decoder.weights import load_decoder
from services.llm.engine.beam.item_mask import RankWork
from services.llm.engine.beam.trie import Trie
from services.llm.engine.cpu.forward import compute_dtype
from services.llm.engine.kv.memory import KvMemory
from services.llm.engine.ranks import READY, EngineRanks, FollowerStart, shard_of
from services.llm.engine.runner import Runner
from services.llm.engine.sequence import BeamState


def main() -> None:
    """Follow rank 0 until it ends."""
    source = sys.stdin.buffer
    start: FollowerStart = pickle.load(source)  # noqa: S301 - rank 0 wrote it
    runner = _runner_of(start)
    beams: dict[int, BeamState] = {}
    while True:
        try:
            plan, ended = pickle.load(source)  # noqa: S301 - rank 0 wrote it
        except EOFError:
            return
        for order in ended:
            beams.pop(order, None)
        rankings = {sequence.order: sequence for sequence in plan.sequences if sequence.num_levels}
        for order, sequence in rankings.items():
            sequence.beams = beams.pop(order, None)
            sequence.work = cast("RankWork", sequence.work).to(start.device)
        runner.submit(plan)
        beams |= {order: sequence.beams for order, sequence in rankings.items() if sequence.beams is not None}


def _runner_of(start: FollowerStart) -> Runner:
    """Load the shard, tell rank 0, and meet the other ranks."""
    device, config = torch.device(start.device), start.config
    dtype = compute_dtype(start.dtype, config) if device.type == "cpu" else start.dtype
    number = config.tensor_parallel_size
    part = shard_of(load_decoder(start.folder, start.dtype, "cpu"), start.rank, number).to(device, dtype)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    ranks = EngineRanks(start.meeting, start.rank, number, config.rank_timeout_s, device)
    trie = Trie(start.items, device) if start.items is not None else None
    return Runner(part, config, trie, KvMemory(part, config).cache, ranks=ranks)


if __name__ == "__main__":
    main()
