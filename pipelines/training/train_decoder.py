"""Stage 4: trains the decoder to predict the next item at every position of every history.

    decoder/         Hugging Face layout, the averaged weights of the epoch with the best validation NDCG@10 (masked);
                     one file per rank if the model is sharded
    item_text.safetensors   if rows are learned from text: the text map for new items
    teacher/         the teacher of a decoder with deeper codes, if it has one (target/teacher.py)
    training.json    the curve, the parameters and the options
    speed.json       tokens and FLOPs per second of the steps, MFU (speed.py), measured and planned memory
    curves.png       loss and validation by step

Runs as one process or as the ranks of a team, which differ only in the rows that they learn from; rank 0 writes. The
recipe is fixed here; its numbers come from `TrainOptions`.

Shape suffixes: B windows, L positions, T = B * L tokens, D hidden.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
import torch
from torch import nn
from torch.nn.utils import parametrize

from models.catalogue import Catalogue, load_catalogue
from models.decoder.adapter import ADAPTER, Adapter
from models.decoder.config import DecoderConfig, read_config
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder, save_decoder
from models.prompt import STRIDE_ITEMS, Prompt
from pipelines.codes.embedding import read_texts
from pipelines.data.examples import Cases, Split, read_cases, read_labelled_sequences, sample_cases
from pipelines.data.labelled import Labelled
from pipelines.planner.devices import Gpus, device_of_driver
from pipelines.runner.stage import Progress
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.dense import hidden_states
from pipelines.scoring.metrics import ndcg, rank_labels
from pipelines.training.batches import IGNORED, Batch, Loss, batch_windows, cut_windows
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.descent import DescentOptions
from pipelines.training.fit.fitting import FitOptions, Fitted, OnValidation, Task, fit
from pipelines.training.parallel.dropout import Dropout
from pipelines.training.parallel.mesh import ONE_PROCESS, Mesh
from pipelines.training.parallel.model import DividedModel, ParallelModel
from pipelines.training.planned_memory import describe_parts, memory_of, predicted_parts
from pipelines.training.reports.curves import CURVES, write_png
from pipelines.training.reports.watched import watched
from pipelines.training.speed import SPEED, speed_of, training_flops
from pipelines.training.start.adapters import adapting_decoder, learned_adapter, save_adapted, with_change
from pipelines.training.start.from_interactions import start_from_use
from pipelines.training.start.from_text_checkpoint import decoder_from_text
from pipelines.training.start.text_rows import ItemText, add_text, folded, learned_text
from pipelines.training.start.warm_start import NUM_CASES, Begun, WarmStart, shortened, tokens_before
from pipelines.training.target.code_paths import CodePaths
from pipelines.training.target.positions import position_loss
from pipelines.training.target.sampled import ItemSampler
from pipelines.training.target.teacher import TEACHER, ItemTeacher, save_teacher, single_level
from pipelines.training.workers.planned import planned
from pipelines.training.workers.team import ONE, Team
from services.errors import ConfigError

log = structlog.get_logger()

_BEAM_CASES = 2_000
"""Cases of a validation by beam search, which takes far longer than dense scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Shape and recipe of the decoder. `max_items` and `stride` are the prompt's (models.prompt)."""

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    feed_forward: int = 160
    max_items: int = 200
    stride: int = STRIDE_ITEMS
    max_batch_tokens: int = 1_024
    dropout: float = 0.3
    sample_items: int = 0
    """Number of items in the training softmax, drawn for each batch; 0: all. With codes deeper than 1 it applies only
    to their teacher."""
    text_size: int = 0
    """Size of an item's text vector for its learned row, in addition to its own vector (text_rows.py); 0: none."""
    use_start: bool = False
    """Whether item rows start from interactions (start/from_interactions.py) instead of random numbers. A warm start
    takes precedence."""
    text_start: str = ""
    """Folder of a text checkpoint whose shape replaces this shape and whose weights are the start
    (start/from_text_checkpoint.py); empty: random weights."""
    text_layers: int = 0
    """Number of the text checkpoint's first layers to use; 0: all."""
    mask_seen: bool = True
    """Learn and validate the next item among items not seen yet, as serving ranks by default. Codes deeper than 1 learn
    non-repeats among all items."""
    seed: int = 0
    teacher_weight: float = 0.0
    """Weight in [0, 1] of a decoder with one token per item in the target of deeper codes; it is trained first, with
    these options (target/teacher.py). 0: none."""
    teacher_dropout: float = 0.3
    adapter_rank: int = 0
    """Rank of the change that the start's frozen decoder learns (start/adapters.py); 0: all weights are learned."""
    adapter_alpha: float = 16.0
    """Its factor, as PEFT defines it."""
    fit: FitOptions = field(
        default_factory=lambda: FitOptions(
            epochs=25,
            validate_every=5,
            descent=DescentOptions(learning_rate=4e-3, weight_decay=0.1, warm_up=0.1, average=0.99),
        )
    )

    def __post_init__(self) -> None:
        """Reject options that cannot be trained. Raises ConfigError naming the field."""
        if self.text_size < 0:
            raise ConfigError(f"text_size: {self.text_size} is no size; give 0 for none, or more, such as 64")
        if self.text_layers < 0 or (self.text_layers and not self.text_start):
            raise ConfigError(
                f"text_layers: {self.text_layers} of no checkpoint; "
                "give text_start and a number of its first layers, or 0 for all"
            )
        if self.use_start and self.text_start:
            raise ConfigError("use_start: true beside text_start, which sets the same rows; give one of them")
        if not 0 <= self.teacher_weight <= 1:
            raise ConfigError(f"teacher_weight: {self.teacher_weight} is no share; give 0 for no teacher, or up to 1")

    @property
    def shape(self) -> dict[str, int]:
        """The shape fields that a text checkpoint overrides."""
        return {name: getattr(self, name) for name in ("hidden_size", "num_layers", "num_heads", "feed_forward")}


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Training data of decoders: a catalogue with the sequences and validation cases of its items, and the device."""

    tokenized: Path
    catalogue: Catalogue
    sequences: Sequence[Labelled]
    valid: Cases
    device: torch.device


@dataclass(frozen=True, slots=True)
class FittedDecoder:
    """The decoder as saved, its text map, and the outcome of the fit."""

    decoder: Decoder
    item_text: ItemText | None
    fitted: Fitted
    begun: Begun | None
    """Bundle version that it started from, if any."""
    adapter: Adapter | None = None
    """What was learned, if the start's weights were frozen; `decoder` includes it."""


def train(
    tokenized: Path,
    options: TrainOptions,
    out: Path,
    checkpoints: Checkpoints,
    device: torch.device,
    progress: Progress,
    start: WarmStart | None = None,
    on_validation: OnValidation | None = None,
    team: Team = ONE,
) -> None:
    """Train, keep the best epoch by validation, and write the decoder with its curve.

    A decoder of deeper codes may have a teacher, trained before it.
    """
    work = partial(train_in, tokenized, options, out, checkpoints, device, start, on_validation)
    catalogue, is_gpu = load_catalogue(tokenized / "catalogue.parquet"), device.type == "cuda"
    length, config = _num_positions(catalogue, options), first_config(catalogue, options)
    if team.is_free and is_gpu and (gpu := device_of_driver(torch.cuda.get_device_name(device))):
        team = planned(team, config, Gpus(gpu, team.workers), options.max_batch_tokens, length)

    def needs(accumulation: int) -> str:
        tokens, num_parts = max(options.max_batch_tokens, length), options.fit.num_parts * accumulation
        is_bf16 = team.method.is_bf16 if team.method.is_bf16 is not None else is_gpu
        parts = predicted_parts(config, team.layout, team.recompute, tokens, num_parts, is_bf16=is_bf16, is_gpu=is_gpu)
        return describe_parts(parts)

    team.fit(work, checkpoints, progress, needs)


def train_in(
    tokenized: Path,
    options: TrainOptions,
    out: Path,
    checkpoints: Checkpoints,
    device: torch.device,
    start: WarmStart | None,
    on_validation: OnValidation | None,
    *,
    progress: Progress,
    mesh: Mesh,
) -> None:
    """Train as one process of a mesh. Rank 0 writes."""
    catalogue = load_catalogue(tokenized / "catalogue.parquet")
    sequences, valid = read_labelled_sequences(tokenized), read_cases(tokenized, Split.VALID)
    data = TrainingData(tokenized, catalogue, sequences, valid, mesh.device(device))
    teacher_decoder = None
    if catalogue.depth > 1 and options.teacher_weight > 0:
        teacher_decoder = train_teacher(data, options, out / TEACHER, checkpoints.of(TEACHER), progress, start, mesh)
    ours = fit_decoder(data, options, checkpoints, progress, start, on_validation, teacher_decoder, mesh, out)
    if mesh.is_main:
        _write(ours, options, out, start, data, mesh)


def _write(
    ours: FittedDecoder, options: TrainOptions, out: Path, start: WarmStart | None, data: TrainingData, mesh: Mesh
) -> None:
    if ours.adapter is not None and start is not None:
        save_adapted(ours.adapter, ours.decoder.config, start.folder / "decoder", out / "decoder")
    elif ours.item_text is not None or not mesh.is_divided:
        save_decoder(ours.decoder, out / "decoder")
    if ours.item_text is not None:
        ours.item_text.save(out)
    about = {
        "options": asdict(options),
        "num_parameters": sum(parameter.numel() for parameter in ours.decoder.parameters()),
        "epochs": (ours.begun.options if ours.begun else options.fit).epochs,
        "text_start": shape_of(ours.decoder.config) if options.text_start else None,
        "started_from": start.version if start is not None and ours.begun is not None else None,
        **asdict(ours.fitted),
    }
    seconds, times, peak_bytes, _ = (about.pop(name) for name in ("seconds", "times", "peak_bytes", "step_bytes"))
    (out / "training.json").write_text(json.dumps(about, indent=1))
    speed = speed_of(ours.fitted.num_tokens, ours.fitted.flops, seconds, data.device, mesh)
    shares = {name: spent / sum(times.values()) for name, spent in times.items()}
    tokens = max(options.max_batch_tokens, options.max_items * data.catalogue.depth)
    memory = memory_of(ours.fitted, ours.decoder.config, mesh, data.device, tokens, options.fit.num_parts)
    figures = {"peak_bytes": peak_bytes, "memory": memory, "shares_of_time": shares, "workers": mesh.world_size}
    (out / SPEED).write_text(json.dumps(speed | figures, indent=1))
    write_png({"decoder": ours.fitted}, out / CURVES)


def train_teacher(
    data: TrainingData,
    options: TrainOptions,
    out: Path,
    checkpoints: Checkpoints,
    progress: Progress,
    start: WarmStart | None,
    mesh: Mesh = ONE_PROCESS,
) -> Decoder:
    """Train the teacher of a decoder with these options, write it and return it."""
    by_item = replace(data, catalogue=single_level(data.catalogue, len(data.catalogue.item_ids)))
    own_start = None if start is None else replace(start, folder=start.folder / TEACHER)

    def show(done: int, total: int, what: str) -> None:
        progress(done, total, f"teacher: {what}")

    own_options = replace(options, dropout=options.teacher_dropout)
    teacher = fit_decoder(by_item, own_options, checkpoints, show, own_start, mesh=mesh).decoder
    if mesh.is_main:
        save_teacher(teacher, by_item.catalogue, out)
    return teacher


def adding_modules(decoder: Decoder) -> list[nn.Module]:
    """Return the modules whose outputs are added to the residual stream, where dropout applies."""
    return [module for name, module in decoder.named_modules() if name.endswith((".output", ".down", "embedding"))]


def fit_decoder(
    data: TrainingData,
    options: TrainOptions,
    checkpoints: Checkpoints,
    progress: Progress,
    start: WarmStart | None = None,
    on_validation: OnValidation | None = None,
    teacher_decoder: Decoder | None = None,
    mesh: Mesh = ONE_PROCESS,
    out: Path | None = None,
    new: Callable[[Catalogue, TrainOptions], Decoder] | None = None,
) -> FittedDecoder:
    """Fit a decoder to the codes of the data's catalogue. `teacher_decoder` is the teacher of deeper codes.

    Ranks of a sharded model write their parts below `out`, if given, except rows learned from text, which are folded
    first. `new` makes the untrained decoder of another class.
    """
    catalogue, device = data.catalogue, data.device
    base = start.folder / "decoder" if options.adapter_rank and start is not None else None
    if base is not None:
        decoder = adapting_decoder(base, options.adapter_rank, options.adapter_alpha, options.seed).to(device)
    else:
        decoder = (new(catalogue, options) if new else first_decoder(data.tokenized, catalogue, options)).to(device)
    begun = None if start is None or base is not None else begin_warm(start, decoder, catalogue, options.fit)
    if options.use_start and begun is None:
        start_from_use(decoder, catalogue, data.sequences)
    rng = np.random.default_rng(options.seed)
    samples = options.sample_items and catalogue.depth == 1  # a level of deeper codes is small
    sampler = ItemSampler(catalogue.popularity, options.sample_items) if samples else None
    num_compared = 1 + options.sample_items if sampler else sum(catalogue.level_sizes) // catalogue.depth
    paths = CodePaths(catalogue, device) if catalogue.depth > 1 else None
    teacher = None
    if paths is not None and teacher_decoder is not None:
        teacher = ItemTeacher(
            teacher_decoder, catalogue.codes, paths.child_PS, options.teacher_weight, mask_seen=options.mask_seen
        )
    encoder = None
    if options.text_size:
        encoder = add_text(decoder, catalogue, read_texts(data.tokenized), options.text_size)
    valid = data.valid if catalogue.depth == 1 else sample_cases(data.valid, _BEAM_CASES)
    if begun is not None:
        valid = sample_cases(valid, NUM_CASES)

    def loss(model: nn.Module, batch: Batch) -> Loss:
        with parametrize.cached():  # rows with a text part are computed once for input and output
            return next_token_loss(
                cast("Decoder", model),
                catalogue,
                batch,
                mask_seen=options.mask_seen,
                sampler=sampler,
                paths=paths,
                teacher=teacher,
            )

    def flops(batch: Batch, num_labels: int) -> int:
        return training_flops(decoder.config, batch.lengths, num_labels * num_compared)

    def validate() -> float:
        plain = folded(decoder) if base is None else with_change(decoder)
        scorer = decoder_scorer(plain, catalogue, Prompt(options.max_items, options.stride))
        return ndcg(rank_labels(scorer, valid).as_served(repeats=not options.mask_seen), 10)

    def export(trained: ParallelModel) -> None:
        if out is not None and isinstance(trained, DividedModel) and encoder is None:
            trained.export(decoder.config, out / "decoder")

    task = Task(
        batches=lambda: batch_windows(
            cut_windows(data.sequences, options.max_items, rng), catalogue, options.max_batch_tokens, rng
        ),
        rng=rng,
        loss=loss,
        validate=validate,
        uniform_loss=math.log(max(2, *catalogue.level_sizes)),
        flops=flops,
        on_validation=on_validation,
        on_fitted=export,
        dropout=Dropout(adding_modules(decoder), options.dropout),
    )
    fit_options, start_shares = (begun.options, begun.start_shares(decoder)) if begun else (options.fit, None)
    if base is not None and start is not None and (base / ADAPTER).is_dir():
        fit_options = shortened(options.fit, start.onward)
    with watched(checkpoints, asdict(options), device, mesh) as watch:
        fitted = fit(decoder, task, fit_options, checkpoints, progress, start_shares, mesh, watch)
    if base is not None and start is not None:
        return FittedDecoder(with_change(decoder), None, fitted, None, learned_adapter(decoder, start.version))
    item_text = None if encoder is None else learned_text(decoder, encoder)
    return FittedDecoder(folded(decoder), item_text, fitted, begun)


def read_training(trained: Path) -> dict[str, Any]:
    """Read training.json, with speed.json under `speed`."""
    about: dict[str, Any] = json.loads((trained / "training.json").read_text())
    return about | {"speed": json.loads((trained / SPEED).read_text())}


def begin_warm(start: WarmStart, decoder: Decoder, catalogue: Catalogue, options: FitOptions) -> Begun | None:
    """Warm-start this decoder, which has fresh weights, from a bundle's. None if they do not fit."""

    def read(folder: Path) -> Decoder:
        return load_decoder(folder / "decoder", torch.float32, decoder.embedding.weight.device)

    return start.begin("train", decoder, catalogue, options, read, tokens_before)


def next_token_loss(
    decoder: Decoder,
    catalogue: Catalogue,
    batch: Batch,
    *,
    mask_seen: bool,
    sampler: ItemSampler | None = None,
    paths: CodePaths | None = None,
    teacher: ItemTeacher | None = None,
) -> Loss:
    """Return the mean cross-entropy over all positions, with the unlikelihood of disliked items, and their number.

    `paths` belong to a catalogue of codes deeper than 1, which does not sample; `teacher` is the teacher of such codes.
    """
    tokens_BL, labels_BL = batch.tokens, batch.labels
    hidden_BLD = hidden_states(decoder, tokens_BL).view(*tokens_BL.shape, -1)
    if paths is not None:
        return paths.loss(hidden_BLD, decoder.head_weight_VD, batch, teacher, mask_seen=mask_seen)
    assert catalogue.depth == 1, "deeper codes have paths"
    (first,), (size,) = catalogue.token_offsets, catalogue.level_sizes
    items_BL = torch.where(labels_BL == IGNORED, IGNORED, labels_BL - first)
    head_VD = decoder.head_weight_VD[first : first + size]
    return position_loss(
        hidden_BLD,
        head_VD,
        items_BL,
        batch.is_label,
        mask_seen=mask_seen,
        sampler=sampler,
        weights_BL=batch.weights,
        disliked=batch.disliked,
    )


def first_decoder(tokenized: Path, catalogue: Catalogue, options: TrainOptions) -> Decoder:
    """Return the untrained decoder: from a text checkpoint, which overrides the options' shape, or with fresh weights.

    Raises ConfigError.
    """
    if not options.text_start:
        return new_decoder(catalogue, options)
    folder, num_positions = Path(options.text_start), _num_positions(catalogue, options)
    texts = read_texts(tokenized)
    decoder = decoder_from_text(folder, options.text_layers, catalogue, texts, num_positions, options.seed)
    log.info("decoder_from_text", checkpoint=str(folder), shape=shape_of(decoder.config), instead_of=options.shape)
    return decoder


def shape_of(config: DecoderConfig) -> dict[str, int]:
    """Return a decoder's shape by the names of the options."""
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "feed_forward": config.intermediate_size,
    }


def first_config(catalogue: Catalogue, options: TrainOptions) -> DecoderConfig:
    """Return the config of the decoder before training.

    Raises CheckpointError for a text checkpoint without a config.
    """
    if options.text_start:
        text = read_config(Path(options.text_start))
        num_layers = options.text_layers or text.num_hidden_layers
        return replace(text, vocab_size=catalogue.vocab_size, num_hidden_layers=num_layers, tie_word_embeddings=True)
    return DecoderConfig(
        vocab_size=catalogue.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.feed_forward,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_heads,
        head_dim=options.hidden_size // options.num_heads,
        max_position_embeddings=_num_positions(catalogue, options),
    )


def new_decoder(catalogue: Catalogue, options: TrainOptions) -> Decoder:
    """Return a decoder with fresh weights: normal, narrower for matrices that write to the residual stream."""
    torch.manual_seed(options.seed)
    decoder = Decoder(first_config(catalogue, options))
    draw_weights(decoder)
    return decoder


def draw_weights(decoder: Decoder) -> None:
    """Draw all matrices anew."""
    for name, parameter in decoder.named_parameters():
        if parameter.dim() > 1:
            adds = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * len(decoder.layers)) ** 0.5 if adds else 0.02)


def _num_positions(catalogue: Catalogue, options: TrainOptions) -> int:
    return (options.max_items + 1) * catalogue.depth
