"""Between two trainings: the live bundle's precomputed lists, made again.

    ingest -> precompute

A list is unused from its user's next event on, and the decoder answers instead.
"""

from rich.console import Console

from models.registry import BundleStore
from pipelines.options import PipelineOptions, Places
from pipelines.publication import precompute
from pipelines.runner.bars import Bars
from pipelines.runner.run_lock import run_lock_if_free
from pipelines.runner.stage import StageCache
from pipelines.stages import ingest_events, store_lists
from services.errors import ConfigError


def refresh_lists(options: PipelineOptions, places: Places, console: Console) -> int:
    """Make the lists of the live bundle again, from current features. Return their number.

    Returns 0 while a whole flow runs, which ends with
    lists of its own. Raises BundleNotFound before the first bundle is live, ConfigError where it was made from tables and none are given,
    DataError for tables that break their schema, DependencyUnavailable.
    """
    with run_lock_if_free(places.stages_dir) as is_free:
        if not is_free:
            console.print(f"another run in {places.stages_dir} is about to make the lists", markup=False)
            return 0
        live, stages = BundleStore.of(places).live(), StageCache(places.stages_dir)
        if options.events is None and (made_from := live.manifest.get("dataset", options.dataset)) != options.dataset:
            own = f"{live.version} was made from the table {made_from!r} and not from {options.dataset}"
            raise ConfigError(f"--events: {own}; give --events and --items as for the training")
        ranker = precompute.ranker_of(live)
        with Bars(console) as bars:
            bars.begin("ingest")
            ingested = ingest_events(stages, options, places)
            bars.end(ingested)

            progress = bars.begin("precompute")
            listed = store_lists(stages, options, places, ingested, ranker, progress)
            bars.end(listed)
    num_lists = len(precompute.read_rows(listed.path))
    console.print(f"{num_lists} lists are fresh")
    return num_lists
