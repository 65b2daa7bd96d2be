"""Between two trainings: the stored lists made anew for the live bundle, from what the online store knows by now.

    ingest -> precompute

Without it a list stays unused from its user's next event on (a newer event makes it stale), and the decoder answers instead.
"""

import time

import polars as pl
from rich.console import Console

from models.catalogue import load_catalogue
from models.registry import BundleStore
from pipelines import ingest, precompute
from pipelines.bars import Bars
from pipelines.run import PipelineOptions, Places
from pipelines.stage import Stages
from services.features.writer import FeatureWriter


def refresh_lists(options: PipelineOptions, places: Places, console: Console) -> int:
    """Write a list for each of the busiest users, and give their number.

    Raises BundleNotFound before the first bundle is live, DataError for tables that break their schema, DependencyAway.
    """
    bundle = BundleStore(places.bundle_root).live()
    catalogue = load_catalogue(bundle.path / "catalogue.parquet")
    ranking = precompute.Ranking(bundle.path / "decoder", catalogue, bundle.version, **bundle.manifest["prompt"])
    stages = Stages(places.state_dir / "pipeline")
    with Bars(console) as bars:
        bars.begin("ingest")
        log = ingest.live_log_files(places.offline_log_dir) if options.with_live_log else ()
        source = ingest.Source(options.events, options.items, log)
        ingested = stages.run("ingest", ingest.key(source), lambda out: ingest.ingest(source, places.cache_dir, out))
        bars.end(ingested)

        progress = bars.begin("precompute")
        writer = FeatureWriter(places.feature_repo)
        events = pl.read_parquet(ingested.path / "events.parquet")
        users = precompute.busiest_users(events, options.precompute.num_users)
        histories = list(writer.read_histories(users).values())
        listed = stages.run(
            "precompute",
            precompute.key(bundle.version, histories, options.precompute),
            lambda out: precompute.precompute(ranking, histories, options.precompute, out, progress),
        )
        rows = precompute.read_rows(listed.path)
        writer.write_precomputed(rows, time.time_ns() // 1_000)
        bars.end(listed)
    return len(rows)
