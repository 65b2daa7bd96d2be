"""A training step of the decoder, plain and by `torch.compile`: what it takes, and after how many steps compiling has paid."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from models.catalogue import load_catalogue
from models.decoder.decoder import Decoder
from pipelines.data.examples import read_labelled_sequences
from pipelines.training.fit.batches import Batch, batch_windows, cut_windows
from pipelines.training.train_decoder import TrainOptions, new_decoder, next_token_loss

_ROUNDS = 60


def measure_compiled(tokenized: Path, options: TrainOptions) -> dict[str, Any]:
    """Return milliseconds of a forward and backward pass over one batch, in turns, and the seconds of compiling."""
    catalogue = load_catalogue(tokenized / "catalogue.parquet")
    rng = np.random.default_rng(0)
    windows = cut_windows(read_labelled_sequences(tokenized), options.max_items, rng)
    batch = batch_windows(windows, catalogue, options.max_batch_tokens, rng)[0]()
    decoder = new_decoder(catalogue, options)

    def step_of(model: nn.Module) -> Callable[[Batch], float]:
        def step(one: Batch) -> float:
            began_s = time.perf_counter()
            loss, _ = next_token_loss(cast("Decoder", model), catalogue, one, mask_seen=options.mask_seen)
            loss.backward()  # type: ignore[no-untyped-call]
            return time.perf_counter() - began_s

        return step

    plain, compiled = step_of(decoder), step_of(cast("nn.Module", torch.compile(decoder)))
    plain(batch)
    compile_s = compiled(batch)
    times = [(plain(batch), compiled(batch)) for _ in range(_ROUNDS)]
    plain_ms, compiled_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    saved_s = (plain_ms - compiled_ms) / 1e3
    return {
        "batch_tokens": int(batch.tokens.numel()),
        "plain_ms": plain_ms,
        "compiled_ms": compiled_ms,
        "compile_s": compile_s,
        "steps_to_pay": compile_s / saved_s if saved_s > 0 else None,
    }
