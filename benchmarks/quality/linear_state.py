"""A decoder whose user state has a fixed size (gated delta rule) against the softmax decoder of the same recipe.

    python -m benchmarks.quality linear-state --json OUT [--state FOLDER] [--sequences FOLDER] [--seeds 1] [--epochs N]

Default data: ml-100k; `--sequences` is a folder as described in benchmarks/quality/sequences.py. Both decoders are
trained on the same data with the same recipe, on one thread; the epoch with the best validation NDCG@10 counts. `delta`
ranks with the recipe's prompt, `delta, whole history` with up to 10,000 items. Differences to `softmax` are paired,
with 95 % intervals over users, each the mean over the seeds. `costs` gives milliseconds on one thread: the prompt of
10, 1,000 and 10,000 items by either decoder, and one event added to a state.
docs/benchmarks.md explains the file.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast

import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from benchmarks.load.command import about_run, exit_on_errors, write_report
from benchmarks.quality.delta_decoder import DeltaDecoder
from benchmarks.quality.options import SEEDS, SeededOptions
from benchmarks.quality.warm_start import tokenize
from models.catalogue import Catalogue, load_catalogue
from models.decoder.decoder import Decoder
from models.prompt import Prompt
from pipelines.data.examples import Split, read_cases, read_labelled_sequences, read_split
from pipelines.declaration import parsed
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.dense import hidden_states
from pipelines.scoring.metrics import gains, interval, rank_labels
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.recipes import choose, data_size, read_recipes
from pipelines.training.train_decoder import (
    TrainingData,
    TrainOptions,
    draw_weights,
    first_config,
    fit_decoder,
    new_decoder,
)

_PROMPTS = (10, 1_000, 10_000)
_ROUNDS = 7
_CHECKPOINT_EVERY_S = 120.0


def new_delta_decoder(catalogue: Catalogue, options: TrainOptions) -> DeltaDecoder:
    """Return a delta decoder with fresh weights."""
    torch.manual_seed(options.seed)
    decoder = DeltaDecoder(first_config(catalogue, options))
    draw_weights(decoder)
    for layer in decoder.delta_layers:
        layer.draw_gates()
    return decoder


_NEW: Mapping[str, Callable[[Catalogue, TrainOptions], Decoder]] = {
    "softmax": new_decoder,
    "delta": new_delta_decoder,
}
_WHOLE = "delta, whole history"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStateOptions(SeededOptions):
    """The options of this benchmark."""

    seeds: Annotated[int, SEEDS] = 1


def main() -> None:
    """Train what the state folder lacks, rank the labels, time both decoders, and write the file."""
    console = Console(stderr=True)
    torch.set_num_threads(1)
    with exit_on_errors():
        options = parsed(LinearStateOptions, __doc__)
        tokenized, state = tokenize(options.sequences, options.state, console)
        runs = [run(tokenized, state / "linear", seed, options.epochs, console) for seed in range(options.seeds)]
    dataset = "ml-100k" if options.sequences is None else options.sequences.resolve().name
    write_report(options.json, about_run("quality linear-state") | {"dataset": dataset} | summarise(runs))


def run(tokenized: Path, state: Path, seed: int, epochs: int | None, console: Console) -> dict[str, Any]:
    """Train both decoders of a seed. Return each variant's gains by split, the trainings' costs and the costs."""
    train = choose(read_recipes(epochs=epochs, seed=seed), data_size(tokenized)).train
    data = TrainingData(
        tokenized,
        load_catalogue(tokenized / "catalogue.parquet"),
        read_labelled_sequences(tokenized),
        read_cases(tokenized, Split.VALID),
        torch.device("cpu"),
    )
    gained: dict[str, dict[str, np.ndarray]] = {}
    decoders, trainings = {}, {}
    for variant in _NEW:
        folder = state / tokenized.name / f"{variant}-{seed}-{train.fit.epochs}"
        decoders[variant], trainings[variant] = fitted(data, train, variant, folder, console)
        gained[variant] = _gains(decoders[variant], data, train.max_items, train.stride)
    gained[_WHOLE] = _gains(decoders["delta"], data, _PROMPTS[-1], train.stride)
    return {
        "gains": gained,
        "training": trainings,
        "costs": costs(decoders["softmax"], cast("DeltaDecoder", decoders["delta"])),
    }


def fitted(
    data: TrainingData, train: TrainOptions, variant: str, folder: Path, console: Console
) -> tuple[Decoder, dict[str, Any]]:
    """Return this variant's trained decoder, and its number of parameters, epochs and processor seconds."""
    weights, about, new = folder / "decoder.safetensors", folder / "training.json", _NEW[variant]
    if not about.exists():

        def show(done: int, total: int, words: str) -> None:
            console.print(f"{variant}: {done} of {total} epochs, {words}", markup=False)

        began_s = time.process_time()
        checkpoints = Checkpoints(folder / "saved", "train", _CHECKPOINT_EVERY_S)
        trained = fit_decoder(data, train, checkpoints, show, new=new)
        save_file({name: value.contiguous() for name, value in trained.decoder.state_dict().items()}, weights)
        num = sum(parameter.numel() for parameter in trained.decoder.parameters())
        spent = {"num_parameters": num, "epochs": train.fit.epochs, "cpu_s": time.process_time() - began_s}
        about.write_text(json.dumps(spent))
    decoder = new(data.catalogue, train)
    decoder.load_state_dict(load_file(weights))
    training: dict[str, Any] = json.loads(about.read_text())
    return decoder.eval(), training


def _gains(decoder: Decoder, data: TrainingData, max_items: int, stride: int) -> dict[str, np.ndarray]:
    """Return each case's NDCG@10 as served, by split."""
    scorer = decoder_scorer(decoder, data.catalogue, Prompt(max_items, stride))
    repeats = bool(read_split(data.tokenized)["repeats"])
    splits = {"validation": data.valid, "test": read_cases(data.tokenized, Split.TEST)}
    return {name: gains(rank_labels(scorer, cases).as_served(repeats=repeats), 10) for name, cases in splits.items()}


@torch.inference_mode()
def costs(softmax: Decoder, delta: DeltaDecoder, prompts: Sequence[int] = _PROMPTS) -> dict[str, Any]:
    """Return the time of prompts by their number of items, of one event, and the bytes of one user's state."""
    rows = [_prompt_ms(softmax, delta, length) for length in prompts]
    token_11 = torch.zeros(1, 1, dtype=torch.int64)
    _, states = delta.advance(token_11)
    return {
        "prompts": rows,
        "event_ms": _median_ms(lambda: delta.advance(token_11, states)),
        "state_bytes": sum(state.num_bytes for state in states),
    }


def _prompt_ms(softmax: Decoder, delta: DeltaDecoder, length: int) -> dict[str, Any]:
    tokens_1L = torch.arange(length)[None] % softmax.config.vocab_size
    return {
        "items": length,
        "softmax_ms": _median_ms(lambda: hidden_states(softmax, tokens_1L)),
        "delta_ms": _median_ms(lambda: delta.advance(tokens_1L)),
    }


def _median_ms(work: Callable[[], object]) -> float:
    def spent() -> Iterator[float]:
        for _ in range(_ROUNDS):
            began_s = time.perf_counter()
            work()
            yield 1e3 * (time.perf_counter() - began_s)

    work()
    return median(spent())


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row per variant and split, the trainings, and the costs of the first seed's decoders."""
    rows = []
    for variant, by_split in runs[0]["gains"].items():
        for split in by_split:
            own_N, softmax_N = (
                np.mean([run["gains"][name][split] for run in runs], axis=0) for name in (variant, "softmax")
            )
            row = {"model": variant, "split": split, "ndcg10": float(own_N.mean()), "num_users": len(own_N)}
            if variant != "softmax":
                change_N = own_N - softmax_N
                row["change"] = [float(change_N.mean()), *interval(change_N, seed=0)]
            rows.append(row)
    return {
        "num_seeds": len(runs),
        "rows": rows,
        "training": [run["training"] for run in runs],
        "costs": runs[0]["costs"],
    }
