"""A short fit of a changed decoder in the common training loop, on the labels and the original's distribution."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from models.catalogue import load_catalogue
from models.decoder.decoder import Decoder
from models.prompt import Prompt
from pipelines.data.examples import Split, read_cases, read_labelled_sequences, sample_cases
from pipelines.optimize.parent import Member
from pipelines.optimize.rounding import as_served
from pipelines.runner.stage import Progress
from pipelines.scoring.beams import decoder_scorer
from pipelines.scoring.dense import hidden_states
from pipelines.scoring.metrics import ndcg, rank_labels
from pipelines.training.batches import IGNORED, Batch, Loss, batch_windows, cut_windows
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.fitting import Fitted, Task, fit
from pipelines.training.parallel.dropout import Dropout
from pipelines.training.target.code_paths import CodePaths
from pipelines.training.target.positions import position_loss
from pipelines.training.target.sampled import ItemSampler
from pipelines.training.target.softmax import Teacher
from pipelines.training.train_decoder import TrainOptions, adding_modules, next_token_loss

_NUM_CASES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Options of a changed decoder's fit.

    Args:
        epochs: Passes over the training sequences.
        num_sequences: Maximum number of training sequences, evenly sampled: a decoder converges long before a pass over
            much data ends.
        rate: Learning rate as a fraction of the recipe's.
        teacher_weight: Weight of the unchanged decoder in the target; codes deeper than 1 learn only their labels.
        dropout: Dropout in training; lower than in a whole training, because the start is already trained.
    """

    epochs: int
    num_sequences: int = 10_000
    rate: float = 0.2
    teacher_weight: float = 0.5
    dropout: float = 0.1


def fine_tune(
    decoder: Decoder,
    teacher: Decoder,
    member: Member,
    options: TrainOptions,
    tuning: Tuning,
    checkpoints: Checkpoints,
    progress: Progress,
    within: Callable[[Decoder], AbstractContextManager[None]] = lambda decoder: nullcontext(),
) -> Fitted:
    """Fit the decoder in place on its member's data, inside the context `within`."""
    catalogue, device = load_catalogue(member.tokenized / "catalogue.parquet"), decoder.embedding.weight.device
    sequences, valid = read_labelled_sequences(member.tokenized), read_cases(member.tokenized, Split.VALID)
    sequences = sequences[:: max(1, -(-len(sequences) // tuning.num_sequences))]
    valid, rng = sample_cases(valid, _NUM_CASES), np.random.default_rng(options.seed)
    samples = options.sample_items and catalogue.depth == 1
    sampler = ItemSampler(catalogue.popularity, options.sample_items) if samples else None
    paths = CodePaths(catalogue, device) if catalogue.depth > 1 else None
    first, size = catalogue.token_offsets[0], catalogue.level_sizes[0]
    teacher.eval()

    def loss(model: nn.Module, batch: Batch) -> Loss:
        learner = cast("Decoder", model)
        with parametrize.cached():
            if paths is not None:
                return next_token_loss(learner, catalogue, batch, mask_seen=options.mask_seen, paths=paths)
            with torch.no_grad():
                known = hidden_states(teacher, batch.tokens).view(*batch.tokens.shape, -1)
            target = Teacher(known, teacher.head_weight_VD.detach()[first : first + size], tuning.teacher_weight)
            hidden = hidden_states(learner, batch.tokens).view(*batch.tokens.shape, -1)
            items = torch.where(batch.labels == IGNORED, IGNORED, batch.labels - first)
            head = learner.head_weight_VD[first : first + size]
            return position_loss(
                hidden,
                head,
                items,
                batch.is_label,
                mask_seen=options.mask_seen,
                sampler=sampler,
                teacher=target,
                weights_BL=batch.weights,
                disliked=batch.disliked,
            )

    def validate() -> float:
        scorer = decoder_scorer(as_served(decoder), catalogue, Prompt(options.max_items, options.stride))
        return ndcg(rank_labels(scorer, valid).as_served(repeats=not options.mask_seen), 10)

    descent = replace(options.fit.descent, learning_rate=options.fit.descent.learning_rate * tuning.rate)
    fit_options = replace(options.fit, epochs=tuning.epochs, validate_every=tuning.epochs, descent=descent)
    with within(decoder):
        task = Task(
            batches=lambda: batch_windows(
                cut_windows(sequences, options.max_items, rng), catalogue, options.max_batch_tokens, rng
            ),
            rng=rng,
            loss=loss,
            validate=validate,
            uniform_loss=math.log(max(2, *catalogue.level_sizes)),
            dropout=Dropout(adding_modules(decoder), tuning.dropout),
        )
        return fit(decoder, task, fit_options, checkpoints, progress)
