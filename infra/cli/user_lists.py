"""`tailrace recommend`: opens the bundle, the histories and the live catalogue for pipelines.publication.user_lists."""

from pathlib import Path

from rich.console import Console

from infra.local.store import feature_store
from models.registry import BundleStore
from pipelines.options import Places
from pipelines.publication.precompute import ranker_of
from pipelines.publication.user_lists import (
    ListOptions,
    ReadHistories,
    read_user_ids,
    started_version,
    table_reader,
    write_lists,
)
from pipelines.runner.bars import Bars
from services.errors import ConfigError
from services.features.writer import FeatureWriter
from services.items.live_items import LiveItems
from services.items.snapshot import read_snapshot
from services.settings.settings import Settings
from services.stream.rebuild import base_table


def write_user_lists(
    settings: Settings, users: Path, out: Path, options: ListOptions, histories: str, console: Console
) -> None:
    """Write the lists, with a progress bar. An unfinished run resumes with the bundle of its start.

    Raises ConfigError naming the option, InvalidRequest for filters with values unknown to the catalogue,
    BundleNotFound, DependencyUnavailable.
    """
    if histories not in ("store", "offline"):
        raise ConfigError(f"--histories: {histories!r} is not known; give store or offline")
    num_users = len(read_user_ids(users))
    store = BundleStore.of(settings)
    version = started_version(out)
    ranker = ranker_of(store.live() if version is None else store.open(version))
    items = LiveItems()
    laid = items.lay(ranker.catalogue)
    read_snapshot(settings.items_snapshot, items)
    available = laid.columns.available[: laid.num_known]

    def write(read: ReadHistories) -> int:
        with Bars(console) as bars:
            return write_lists(ranker, available, users, read, options, out, bars.begin("recommend"))

    if histories == "offline":
        num_added = write(table_reader(base_table(settings.offline_log_dir)))
    else:
        with feature_store(settings, lambda line: console.print(line, markup=False)) as running:
            writer = FeatureWriter(Places.from_settings(running).feature_repo)
            num_added = write(writer.read_histories)
            writer.close()
    kept = "" if num_added == num_users else f", {num_users - num_added} of them before this run"
    console.print(f"{out}: lists of {num_users} users by {ranker.bundle_version}{kept}", markup=False)
