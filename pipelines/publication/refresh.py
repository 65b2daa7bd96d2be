"""Between two trainings: the stored lists made anew for the live bundle, from what the online store knows by now.

    ingest -> precompute

Without it a list stays unused from its user's next event on (a newer event makes it stale), and the decoder answers instead.
"""

from rich.console import Console

from models.catalogue import load_catalogue
from models.registry import BundleStore
from pipelines.publication import precompute
from pipelines.run import PipelineOptions, Places, ingest_events, list_for_busiest
from pipelines.runner.bars import Bars
from pipelines.runner.run_lock import turn_if_free
from pipelines.runner.stage import Stages


def refresh_lists(options: PipelineOptions, places: Places, console: Console) -> int:
    """Write a list for each of the busiest users, and give their number; 0 while the whole flow runs, which ends with lists.

    Raises BundleNotFound before the first bundle is live, DataError for tables that break their schema, DependencyAway.
    """
    with turn_if_free(places.stages_dir) as is_free:
        if not is_free:
            console.print(f"another run in {places.stages_dir} is about to make the lists", markup=False)
            return 0
        num_lists = _refresh(options, places, console)
    console.print(f"{num_lists} lists are fresh")
    return num_lists


def _refresh(options: PipelineOptions, places: Places, console: Console) -> int:
    bundle = BundleStore(places.bundle_root).live()
    catalogue = load_catalogue(bundle.path / "catalogue.parquet")
    ranking = precompute.Ranking(bundle.path / "decoder", catalogue, bundle.version, **bundle.manifest["prompt"])
    stages = Stages(places.stages_dir)
    with Bars(console) as bars:
        bars.begin("ingest")
        ingested = ingest_events(stages, options, places)
        bars.end(ingested)

        progress = bars.begin("precompute")
        listed = list_for_busiest(stages, options.precompute, places, ingested, ranking, progress)
        bars.end(listed)
    return len(precompute.read_rows(listed.path))
