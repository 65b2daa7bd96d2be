"""Starts a training from the weights of the live bundle: rows of tokens and items are matched by item id, all other weights are taken over.

A new item starts from the mean of the known rows, plus its own random start, so that no two are alike. What does not fit is refused whole, and the
training then starts from random weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from models.catalogue import NUM_SPECIAL_TOKENS, Catalogue, load_catalogue
from models.registry import BundleStore
from pipelines.training.fit.fitting import FitOptions
from services.errors import BundleError, CheckpointError

log = structlog.get_logger()

_EPOCHS = 0.25
_RATE = 2.0
"""Of the learning rate: new events are seen in a quarter of the epochs, so they need larger steps. At half of the rate less is kept (benchmarks.warm_start)."""
_BY_ROW = ("embedding.weight", "head.weight")

Read = Callable[[Path], nn.Module]
"""Reads the model of a bundle's folder. May raise CheckpointError."""
RowsBefore = Callable[[Catalogue, Catalogue], np.ndarray]
"""(the bundle's catalogue, the present one) -> the older row of each row, -1 for a new one. May raise CheckpointError."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The folder of a bundle to start from, and its version."""

    folder: Path
    version: str

    def begin(
        self, stage: str, fresh: nn.Module, catalogue: Catalogue, options: FitOptions, read: Read, rows: RowsBefore
    ) -> FitOptions:
        """Load the bundle's weights into this model, which has fresh ones, and return the schedule that suffices then.

        What does not fit is logged, and the model and its whole schedule stay as they are.
        """
        try:
            before = load_catalogue(self.folder / "catalogue.parquet")
            _take_over(fresh, read(self.folder), rows(before, catalogue))
        except (BundleError, CheckpointError) as error:
            log.warning("warm_start_refused", stage=stage, bundle=self.version, why=f"{error}: full training")
            return options
        return shortened(options)


def live_start(bundle_root: Path) -> WarmStart | None:
    """Return the live bundle as a start, verified; without one that is whole, log why and return None."""
    try:
        live = BundleStore(bundle_root).live()
        live.verify()
    except BundleError as error:
        log.warning("warm_start_refused", why=f"{error}: full training")
        return None
    return WarmStart(live.path, live.version)


def shortened(options: FitOptions) -> FitOptions:
    """Return the schedule of a fit that starts warm: a quarter of the epochs at twice the learning rate, and two validations, which cost much beside so few epochs."""
    epochs = max(1, round(options.epochs * _EPOCHS))
    rate = options.descent.learning_rate * _RATE
    return replace(
        options,
        epochs=epochs,
        validate_every=min(options.validate_every, -(-epochs // 2)),
        descent=replace(options.descent, learning_rate=rate),
    )


def _items_before(before: Catalogue, now: Catalogue) -> np.ndarray:
    """Return each item's index in the older catalogue, -1 for a new one."""
    known = before.index_of
    return np.array([known.get(item_id, -1) for item_id in now.item_ids], dtype=np.int64)


def rows_before(before: Catalogue, now: Catalogue) -> np.ndarray:
    """Return the student's older row of each of its rows, -1 for a new one: the beginning of a history, then items."""
    items = _items_before(before, now)
    return np.concatenate(([0], np.where(items < 0, -1, items + 1)))


def tokens_before(before: Catalogue, now: Catalogue) -> np.ndarray:
    """Return each token's older token, -1 for a new one. Codes deeper than 1 are shared by items, so their book must be the same."""
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
            found = tuple(values[name].shape) if name in values else "absent"
            raise CheckpointError(f"its {name} is {found}, and {tuple(start.shape)} is wanted")
        value = values[name].to(start.device)
        merged[name] = _matched(value, start, torch.from_numpy(rows).to(start.device)) if name in _BY_ROW else value
    fresh.load_state_dict(merged)


def _matched(old_VD: Tensor, start_VD: Tensor, rows_V: Tensor) -> Tensor:
    known_V1 = (rows_V >= 0).unsqueeze(1)
    return torch.where(known_V1, old_VD[rows_V.clamp(min=0)], old_VD.mean(dim=0) + start_VD)
