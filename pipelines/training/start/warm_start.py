"""Warm start from trained weights: token and item rows are matched by item ID, all other weights are copied.

A nightly training starts from the pair that the gate judged in the last whole training. The serving weights have
learned the labels that the next gate judges by, and chaining nightly starts would learn the same events ever more
often, until they are memorised. A new item starts from the mean of the known rows plus its own random start, so that no
two are equal. A quarter of the epochs follows at a high rate, which learns the new events and harms older knowledge;
the mean of start and end keeps both ("model soup", Wortsman et al. 2022, arXiv:2203.05482). Weights that do not fit or
are too old are rejected as a whole, and the training starts from random weights. A refit (pipelines.publication.refit)
starts from the pair that was just judged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import structlog
import torch
from torch import Tensor, nn

from models.catalogue import NUM_SPECIAL_TOKENS, Catalogue, load_catalogue
from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from pipelines.training.fit.fitting import FitOptions
from services.errors import BundleError, CheckpointError

log = structlog.get_logger()

_BY_ROW = ("embedding.weight", "head.weight")
_OWN_ROWS = "embedding.parametrizations.weight.original"
"""Name of the row parameter in a decoder whose rows are also learned from text (text_rows)."""
NUM_CASES = 2_000
"""Number of validation cases: there is one validation, which chooses nothing."""
MAX_NEW_SHARE = 0.025
"""Maximum fraction of new events: beyond it the mean with the start lags behind, and a whole training is better
(benchmarks.quality warm-start)."""

Read = Callable[[Path], nn.Module]
"""Reads the model of a bundle's folder. May raise CheckpointError."""
RowsBefore = Callable[[Catalogue, Catalogue], np.ndarray]
"""(the bundle's catalogue, the present catalogue) -> the older row of each row, -1 if new. May raise
CheckpointError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Onward:
    """How a fit continues from trained weights.

    It has factors on the recipe's epochs and learning rate, and the fraction of the initial weights in the result.
    """

    epochs: float
    rate: float
    start_share: float


NIGHTLY = Onward(epochs=0.25, rate=2.0, start_share=0.5)
"""New events are seen in a quarter of the epochs, so they need larger steps. At half of the rate less is kept
(benchmarks.quality warm-start)."""


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """How a fit continues from loaded weights.

    It has the schedule, the fraction of the initial weights in the result, and the new rows (V,).
    """

    options: FitOptions
    start_share: float
    is_new_V: Tensor

    def start_shares(self, model: nn.Module) -> list[Tensor]:
        """Return each parameter's fraction of the initial weights in the mean: 0 for new rows, started at random."""
        share = torch.full((), self.start_share)
        by_row_V1 = torch.where(self.is_new_V, 0.0, share).unsqueeze(1)
        return [
            (by_row_V1 if name in {*_BY_ROW, _OWN_ROWS} else share).to(parameter.device)
            for name, parameter in model.named_parameters()
        ]


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The pair to start from, in a bundle's layout, the version of its bundle, and the schedule."""

    folder: Path
    version: str
    onward: Onward = NIGHTLY

    def begin(
        self, stage: str, fresh: nn.Module, catalogue: Catalogue, options: FitOptions, read: Read, rows: RowsBefore
    ) -> Begun | None:
        """Load the pair's weights into this model, which has fresh weights, and return how to continue.

        If they do not fit, log it, return None, and leave the model unchanged.
        """
        try:
            before = load_catalogue(self.folder / "catalogue.parquet")
            rows_before_V = rows(before, catalogue)
            _take_over(fresh, read(self.folder), rows_before_V)
        except (BundleError, CheckpointError) as error:
            log.warning("warm_start_refused", stage=stage, bundle=self.version, why=f"{error}: full training")
            return None
        return Begun(shortened(options, self.onward), self.onward.start_share, torch.from_numpy(rows_before_V < 0))


def verified_live(store: BundleStore) -> Bundle | None:
    """Return the verified live bundle. Log the reason and return None if there is none intact."""
    try:
        live = store.live()
        live.verify()
    except BundleError as error:
        log.warning("warm_start_refused", why=f"{error}: full training")
        return None
    return live


def last_whole_training(store: BundleStore, live: Bundle, events: Path) -> WarmStart | None:
    """Return the judged pair of the live bundle, or of its whole training, as a start for training on these events.

    The pair is verified. Log the reason and return None if it is unreadable or too old.
    """
    try:
        whole = live
        if live.started_from is not None:
            whole = store.open(live.started_from)
            whole.verify()
        _check_age(whole, events)
    except (BundleError, CheckpointError) as error:
        log.warning("warm_start_refused", why=f"{error}: full training")
        return None
    return WarmStart(whole.judged_dir, whole.version)


def shortened(options: FitOptions, onward: Onward) -> FitOptions:
    """Return the schedule of a warm-started fit, with one validation at its end."""
    epochs = max(1, int(options.epochs * onward.epochs))
    rate = options.descent.learning_rate * onward.rate
    return replace(options, epochs=epochs, validate_every=epochs, descent=replace(options.descent, learning_rate=rate))


def _check_age(bundle: Bundle, events: Path) -> None:
    """Raise CheckpointError if too many events are new to the bundle: after its newest event, or of an unknown item."""
    newest_us = bundle.manifest.get("data", {}).get("newest_event_us")
    if newest_us is None:
        raise CheckpointError(f"{bundle.version}: its manifest has no newest event")
    is_known = pl.col("item_id").is_in(pl.Series(bundle.item_ids()).implode())
    is_new = (pl.col("event_time").dt.epoch("us") > newest_us) | ~is_known
    new_share = pl.scan_parquet(events).select(is_new.mean()).collect().item()
    if new_share > MAX_NEW_SHARE:
        raise CheckpointError(
            f"{new_share:.1%} of the events are new to {bundle.version}, and a start keeps up with {MAX_NEW_SHARE:.1%}"
        )


def _items_before(before: Catalogue, now: Catalogue) -> np.ndarray:
    """Return each item's index in the older catalogue, -1 for a new item."""
    known = before.index_of
    return np.array([known.get(item_id, -1) for item_id in now.item_ids], dtype=np.int64)


def rows_before(before: Catalogue, now: Catalogue) -> np.ndarray:
    """Return the older row of each of the student's rows, -1 if new: the beginning of a history, then items."""
    items = _items_before(before, now)
    return np.concatenate(([0], np.where(items < 0, -1, items + 1)))


def tokens_before(before: Catalogue, now: Catalogue) -> np.ndarray:
    """Return each token's older token, -1 if new.

    Codes deeper than 1 are shared by items, so their book must be equal.
    """
    if before.depth != now.depth or (now.depth > 1 and before.level_sizes != now.level_sizes):
        raise CheckpointError(f"its codes have levels of {before.level_sizes}, and these have {now.level_sizes}")
    old_items = _items_before(before, now)
    if now.depth > 1:
        shared = old_items >= 0
        if not np.array_equal(before.codes[old_items[shared]], now.codes[shared]):
            raise CheckpointError("its codes are of another code book")
        return np.arange(now.vocab_size)
    tokens = np.full(now.vocab_size, -1, dtype=np.int64)
    tokens[:NUM_SPECIAL_TOKENS] = np.arange(NUM_SPECIAL_TOKENS)
    known = old_items >= 0
    tokens[now.codes[known, 0] + NUM_SPECIAL_TOKENS] = before.codes[old_items[known], 0] + NUM_SPECIAL_TOKENS
    return tokens


@torch.no_grad()
def _take_over(fresh: nn.Module, old: nn.Module, rows: np.ndarray) -> None:
    values: Mapping[str, Tensor] = old.state_dict()
    merged = {}
    for name, start in fresh.state_dict().items():
        if name not in values or values[name].shape[name in _BY_ROW :] != start.shape[name in _BY_ROW :]:
            shape = tuple(values[name].shape) if name in values else "absent"
            raise CheckpointError(f"its {name} is {shape}, and {tuple(start.shape)} is wanted")
        value = values[name].to(start.device)
        merged[name] = _matched(value, start, torch.from_numpy(rows).to(start.device)) if name in _BY_ROW else value
    fresh.load_state_dict(merged)


def _matched(old_VD: Tensor, start_VD: Tensor, rows_V: Tensor) -> Tensor:
    known_V1 = (rows_V >= 0).unsqueeze(1)
    return torch.where(known_V1, old_VD[rows_V.clamp(min=0)], old_VD.mean(dim=0) + start_VD)
