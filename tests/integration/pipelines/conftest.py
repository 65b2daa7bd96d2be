"""The whole offline flow on a synthetic data set and a real store: a state folder after one run, and copies of it."""

import io
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import polars as pl
import pytest
import torch
from redis import Redis
from rich.console import Console

from pipelines.codes.options import CodesOptions
from pipelines.codes.tokenize import tokenize
from pipelines.evaluation.gate import GateOptions
from pipelines.features import point_in_time
from pipelines.options import PipelineOptions, PrecomputeOptions
from pipelines.places import Places
from pipelines.run import PipelineReport, run_pipeline
from pipelines.training.recipes import Recipe
from pipelines.training.train_decoder import TrainOptions
from pipelines.training.workers.team import ONE, Team
from pipelines.wishes.options import WishOptions
from services.settings.settings import Settings
from tests.support.gateway.rows import declare_whole
from tests.support.servers import HOST, Server, valkey_server
from tests.support.training.synthetic import (
    histories_from,
    raw_events,
    raw_items,
    write_ingested,
    write_with_dislikes,
)
from tests.support.training.teams import Undisturbed, trained
from tests.unit.pipelines.conftest import SMALL_DECODER, SMALL_STUDENT


def quiet() -> Console:
    return Console(file=io.StringIO())


def run(options: PipelineOptions, places: Places) -> tuple[PipelineReport, str]:
    """Run the pipeline; return its report and its output."""
    shown = io.StringIO()
    return run_pipeline(options, places, Console(file=shown, width=400)), shown.getvalue()


def some_new_events(path: Path, num_users: int) -> None:
    """Rewrite the events table with one more event for this number of users."""
    day = raw_events(40, 30, 13).with_columns(number=pl.int_range(pl.len()).over("user_id"))
    day.filter((pl.col("number") < 12) | (pl.col("user_id") < f"u{num_users:03d}")).drop("number").write_csv(path)


def places_in(folder: Path, store: Server) -> Places:
    """A separate state folder."""
    settings = Settings(state_dir=folder, redis_host=HOST, redis_port=store.port, history_max_items=100, keep_bundles=2)
    return Places.from_settings(settings)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One Valkey for this folder."""
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        with Redis(host=HOST, port=server.port) as client:
            declare_whole(client)
        yield server


@pytest.fixture(scope="session", autouse=True)
def joining() -> Iterator[None]:
    """One process for the joins of all runs, which imports Feast once; the command uses one process per run."""
    with ProcessPoolExecutor(1, get_context("spawn")) as child, pytest.MonkeyPatch.context() as patch:
        patch.setattr(point_in_time, "ProcessPoolExecutor", lambda *_, **__: nullcontext(child))
        yield


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> PipelineOptions:
    """Tables of a ring of items, small models, and a gate that they pass."""
    folder = tmp_path_factory.mktemp("own")
    raw_events(40, 30, 12).write_csv(folder / "events.csv")
    raw_items(30).write_ndjson(folder / "items.jsonl")
    return PipelineOptions(
        events=folder / "events.csv",
        items=folder / "items.jsonl",
        recipes=(Recipe(train=SMALL_DECODER, distill=SMALL_STUDENT),),
        gate=GateOptions(baseline="popularity", student_floor=0.5),
        precompute=PrecomputeOptions(num_users=10, list_len=5),
        wishes=WishOptions(encoder="none"),
    )


@pytest.fixture(scope="session")
def copied_state(
    tmp_path_factory: pytest.TempPathFactory, store: Server, options: PipelineOptions
) -> Callable[[Path], Places]:
    """Copy a state folder after one pipeline run with these options."""
    trained = places_in(tmp_path_factory.mktemp("state"), store)
    run_pipeline(options, trained, quiet())

    def copy(folder: Path) -> Places:
        shutil.copytree(trained.state_dir, folder)
        return places_in(folder, store)

    return copy


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of the ring at depth 1 (`tokens`) and 2 (`deep`), and with label weights and dislikes (`...weighted`)."""
    folder = tmp_path_factory.mktemp("data")
    plain, weighted = write_ingested(folder / "ingest"), write_with_dislikes(folder / "weighted-ingest")
    for name, ingested, depth in (
        ("tokens", plain, 1),
        ("deep", plain, 2),
        ("weighted", weighted, 1),
        ("weighted-deep", weighted, 2),
    ):
        (folder / name).mkdir()
        tokenize(ingested, histories_from(ingested), 1_000, folder / name, CodesOptions(depth=depth))
    torch.set_num_threads(1)
    return folder


@pytest.fixture(scope="session")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """An undisturbed training for comparison: the folder, and the losses by epoch."""

    @cache
    def once(tokens: str, options: TrainOptions, team: Team = ONE) -> tuple[Path, dict[str, float]]:
        out = tmp_path_factory.mktemp("undisturbed")
        return out, trained(data / tokens, options, out, team)

    return once
