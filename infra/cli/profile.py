"""`tailrace profile train|rank|text`: profiles a run, or reads traces that a profiler wrote."""

import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.session import check_output
from services.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import torch

    from models.decoder.decoder import Decoder
    from models.registry.bundle import Bundle
    from pipelines.profiler.record import Work

_NUM_STEPS, _NUM_RANKINGS, _NUM_TEXTS, _NUM_IN, _NUM_OUT = 8, 64, 8, 128, 32
_WINDOWS_A_STEP = 64


class Subject(StrEnum):
    """The work to profile."""

    TRAIN = "train"
    RANK = "rank"
    TEXT = "text"


def profile(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="train|rank|text", help="The work to profile; after --trace, more trace files.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Read these traces instead of running: Kineto's, Chrome's or nsys's SQLite, one a rank."),
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures of each rank.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the timeline as a page.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the timeline as a picture.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the recorded trace, as .json or .json.gz.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint folder for text.", show_default="the live bundle's decoder")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run: auto, cpu or cuda.")] = "auto",
) -> None:
    """Print the time by cause, the most expensive operations, and the bottleneck in one sentence."""
    from pipelines.profiler.report import as_json, as_lines, profile_of
    from pipelines.profiler.timeline import as_html
    from pipelines.profiler.trace import read_traces

    subject, files = _parse(words or [], trace or [])
    check_output(*files, json=json_out, html=html, png=png, keep=keep)
    with TemporaryDirectory() as scratch:
        if not files:
            files = [keep or Path(scratch) / f"{subject}.json"]
            _record(subject, files[0], model, device)
        profiles = [profile_of(trace) for trace in read_traces(files)]
    for line in as_lines(profiles):
        typer.echo(line)
    if json_out is not None:
        json_out.write_text(json.dumps(as_json(profiles), indent=1) + "\n")
    if html is not None:
        html.write_text(as_html(profiles))
    if png is not None:
        from pipelines.profiler.picture import write_png

        write_png(profiles, png)


def _parse(words: list[str], traces: list[Path]) -> tuple[Subject, list[Path]]:
    """Return what to run, and the trace files: words after --trace other than the subject are files."""
    known = set(Subject)
    named, others = [word for word in words[:1] if word in known], words
    if named:
        others = words[1:]
    if others and not traces:
        raise InvalidRequest(others[0], "is unknown work", f"give one of {', '.join(Subject)}, or --trace FILE")
    if not named and not traces:
        raise InvalidRequest("profile", "the work is missing", f"give one of {', '.join(Subject)}, or --trace FILE")
    return Subject(named[0]) if named else Subject.TRAIN, [*traces, *(Path(word) for word in others)]


def _record(subject: Subject, out: Path, model: Path | None, device: str) -> None:
    import torch

    from models.decoder.weights import load_decoder
    from models.registry.store import BundleStore
    from pipelines.profiler.record import record
    from pipelines.training.fit.device import choose_device
    from services.settings.settings import load_settings

    if model is not None and subject is not Subject.TEXT:
        raise ConfigError(f"--model: {subject} runs the live bundle's decoder; give --model only with text")
    where = choose_device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    if model is not None:
        record(_texts(load_decoder(model, dtype, where)), out, where, dtype)
        return
    bundle = BundleStore.of(load_settings()).live()
    decoder = load_decoder(bundle.decoder_dir, torch.float32 if subject is Subject.TRAIN else dtype, where)
    match subject:
        case Subject.TRAIN:
            work = _training(bundle, decoder, where)
        case Subject.RANK:
            work = _ranking(bundle, decoder)
        case Subject.TEXT:
            work = _texts(decoder)
    record(work, out, where, dtype)


def _training(bundle: "Bundle", decoder: "Decoder", device: "torch.device") -> "Work":
    """Return training steps of the decoder on windows of random items: time depends on sizes, not on item values."""
    import numpy as np
    import torch

    from models.prompt import prompt_of
    from pipelines.profiler.record import training
    from pipelines.training.batches import Batch, batch_windows
    from pipelines.training.fit.descent import Descent
    from pipelines.training.fit.prefetch import ready_batches
    from pipelines.training.target.code_paths import CodePaths
    from pipelines.training.train_decoder import TrainOptions, next_token_loss

    catalogue, options = bundle.catalogue(), TrainOptions()
    descent, draw = Descent(decoder.train(), options.fit.descent), np.random.default_rng(0)
    paths = CodePaths(catalogue, device) if catalogue.depth > 1 else None
    most = prompt_of(bundle.manifest).max_items

    def steps() -> Iterator[Callable[[], object]]:
        lengths = draw.integers(most // 2, most + 1, _WINDOWS_A_STEP * _NUM_STEPS)
        windows = [draw.integers(0, len(catalogue.item_ids), length) for length in lengths]
        makes = batch_windows(windows, catalogue, options.max_batch_tokens, draw)[:_NUM_STEPS]
        with ready_batches(makes, device) as batches:
            for batch in batches:
                yield partial(step, batch)

    def step(batch: Batch) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):  # same computation as in `fit`
            loss = next_token_loss(decoder, catalogue, batch, mask_seen=options.mask_seen, paths=paths)
        descent.step([loss], 0.5)

    return training(steps)


def _ranking(bundle: "Bundle", decoder: "Decoder") -> "Work":
    """Return rankings of random histories by the engine, as in a replica."""
    from models.prompt import prompt_of
    from models.search import search_of
    from pipelines.profiler.record import of_engine
    from services.llm.engine.beam.trie import ItemCodes
    from services.llm.engine.config import EngineConfig
    from services.llm.engine.engine import Engine

    catalogue = bundle.catalogue()
    items = ItemCodes.of(catalogue, search_of(bundle.manifest))
    engine = Engine(decoder.eval(), EngineConfig(), items=items, bundle_version=bundle.version)
    engine.warm_up()
    prompt = prompt_of(bundle.manifest, bundle.decoder_dir)

    def add(draw: "np.random.Generator") -> None:
        for number in range(_NUM_RANKINGS):
            history = draw.integers(0, len(catalogue.item_ids), prompt.max_items // 2).tolist()
            engine.add_rank(f"{number}", prompt.tokens(catalogue, history), k=10)

    return of_engine(engine, add)


def _texts(decoder: "Decoder") -> "Work":
    from pipelines.profiler.record import of_engine
    from services.llm.engine.config import EngineConfig
    from services.llm.engine.engine import Engine

    engine = Engine(decoder, EngineConfig(), items=None, bundle_version="profile")
    engine.warm_up()
    num_in = min(_NUM_IN, decoder.config.max_position_embeddings - _NUM_OUT)

    def add(draw: "np.random.Generator") -> None:
        for number in range(_NUM_TEXTS):
            prompt = draw.integers(0, decoder.config.vocab_size, num_in).tolist()
            engine.add_text(f"{number}", prompt, max_new_tokens=_NUM_OUT)

    return of_engine(engine, add)
