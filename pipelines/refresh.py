"""Refreshes precomputed lists between two trainings, and makes a candidate's lists before its release begins.

    ingest -> (sources) -> precompute

A list is unused from its user's next event on; the decoder answers instead.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import polars as pl
from rich.console import Console

from models.registry.bundle import Bundle
from models.registry.store import BundleStore
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.publication import precompute
from pipelines.publication.refresh_sources import refresh_sources
from pipelines.runner.bars import Bars
from pipelines.runner.run_lock import run_lock_if_free
from pipelines.runner.stage import StageCache
from pipelines.stages import ingest_events, store_lists
from services.errors import ConfigError


def refresh_lists(
    options: PipelineOptions,
    places: Places,
    console: Console,
    versions: Sequence[str] | None = None,
    *,
    with_sources: bool = False,
) -> int:
    """Make the lists of these versions again from current features; return the number of lists of the last version.

    `with_sources` first counts the live bundle's sources again, in a child bundle that it promotes; not during a
    release, whose versions stay as they are.

    Without versions, uses the live bundle and the candidate of a release under way. Returns 0 during a whole flow,
    which ends with its own lists. Raises BundleNotFound before the first bundle is live, ConfigError if the live bundle
    was made from tables but none are given, DataError for tables that violate their schema, DependencyUnavailable.
    """
    with run_lock_if_free(places.stages_dir) as is_free:
        if not is_free:
            console.print(f"another run in {places.stages_dir} already computes the lists", markup=False)
            return 0
        store, stages = BundleStore.of(places), StageCache(places.stages_dir)
        serving = versions or store.record().serving
        bundles = [store.open(version) for version in serving] or [store.live()]
        for bundle in bundles:
            _refuse_other_data(bundle, options)
        with Bars(console) as bars:
            bars.begin("ingest")
            ingested = ingest_events(stages, options, places)
            bars.end(ingested)
            if with_sources and len(bundles) == 1 and versions is None:
                events = pl.read_parquet(ingested.path / "events.parquet")
                bundles = [refresh_sources(store, events, datetime.now(UTC))]
                store.prune_after_publication(places.keep_bundles)

            for bundle in bundles:
                progress = bars.begin("precompute")
                listed = store_lists(stages, options, places, ingested, precompute.ranker_of(bundle), progress)
                bars.end(listed)
    num_lists = len(precompute.read_rows(listed.path))
    console.print(f"{num_lists} lists are fresh")
    return num_lists


def _refuse_other_data(bundle: Bundle, options: PipelineOptions) -> None:
    """Raise ConfigError if a bundle was made from tables that the options do not name."""
    made_from = bundle.manifest.get("dataset", options.dataset)
    if options.events is None and made_from != options.dataset:
        own = f"{bundle.version} was trained on the table {made_from!r}, not on {options.dataset}"
        raise ConfigError(f"--events: {own}; give --events and --items as for the training")
