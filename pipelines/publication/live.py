"""Finds the live bundle that a run is to replace, before anything is trained, and the reference.

A bundle of other data is replaced only with an option. Data is identified by its items, because tables may be renamed
and two shops may number their items alike: items are equal if ID and title are.
"""

from pathlib import Path

import polars as pl
import structlog

from models.catalogue import Catalogue
from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from pipelines.data.options import SplitKind
from pipelines.options import STAGE_NAMES, PipelineOptions
from pipelines.runner.stage import StageOutput
from services.errors import BundleError, StageFailed

log = structlog.get_logger()

MIN_SHARED = 0.1
"""Minimum fraction of the smaller catalogue's items in the other catalogue. One shop's catalogues share more from year
to year; two shops' catalogues share no items."""

_SET_REFERENCE = "until one of this data is set, small losses can add up: tailrace bundles reference VERSION"


def live_of(
    store: BundleStore, version: str | None, ingested: StageOutput, options: PipelineOptions, command: str
) -> Bundle | None:
    """Return the live version as a bundle.

    None if it is missing, unreadable, without models, or of other data and replaceable.

    Raises StageFailed, with the fix for `command`, if the data differs and the run would publish it.
    """
    if version is None:
        return None
    live = None
    try:
        live = store.open(version)
        if not live.is_trained:  # made of items only: nothing to compare with or start from
            return None
        other = describe_other(pl.read_parquet(ingested.path / "items.parquet"), live.catalogue())
    except BundleError as error:
        log.warning("live_bundle_unreadable", why=str(error))
        return live
    if other is None:
        if options.replace_live:
            log.warning("replace_live_without_effect", why=f"the data is that of {version}, so it is compared")
        return live
    is_judged = (
        STAGE_NAMES.index(options.until) >= STAGE_NAMES.index("gate") and options.split == SplitKind.LEAVE_ONE_OUT
    )
    if is_judged and not options.replace_live:
        raise StageFailed(
            ingested.stage,
            f"{other}: the data differs from that of the live bundle {version} ({live.manifest.get('dataset')}), so "
            f"no comparison is possible; nothing was trained. To replace that bundle by one of this data: {command} "
            "--replace-live. To keep both, set TAILRACE_STATE_DIR to a folder for this data",
        )
    log.warning("live_bundle_of_other_data", bundle=version, why=other)
    return None


def reference_of(store: BundleStore, ingested: Path) -> tuple[Bundle | None, str]:
    """Return the reference as a bundle, and a sentence on it.

    The bundle is None if it is missing, unreadable, or of other data; the sentence says which.
    """
    try:
        reference = store.reference()
        if reference is None:
            return None, "no bundle is the reference yet: the first whole training is, until a person sets another"
        bundle = store.open(reference.version)
        bundle.verify()
        if not bundle.is_trained:
            return None, f"not compared with the reference, {reference.version}, which has no models; {_SET_REFERENCE}"
        other = describe_other(pl.read_parquet(ingested / "items.parquet"), bundle.catalogue(), "of that bundle")
    except BundleError as error:
        return None, f"not compared with the reference, which cannot be read ({error}); {_SET_REFERENCE}"
    if other:
        return None, f"not compared with the reference, {reference.version}: {other}; {_SET_REFERENCE}"
    return bundle, reference.describe()


def describe_other(items: pl.DataFrame, catalogue: Catalogue, whose: str = "that are live") -> str | None:
    """Return a sentence on how few of these items the catalogue has; None if the data is the same."""
    titles = dict(zip(catalogue.item_ids, catalogue.titles, strict=True))
    is_same = [
        titles.get(item_id) == title for item_id, title in items.select("item_id", "title").rows() if item_id in titles
    ]
    num_same = sum(is_same)
    if num_same >= MIN_SHARED * min(items.height, len(titles)):
        return None
    renamed = f" ({len(is_same) - num_same} more share the id, with another title)" if len(is_same) > num_same else ""
    return f"{num_same} of {items.height} items are among the {len(titles)} {whose}{renamed}"
