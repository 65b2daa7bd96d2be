"""An experiment on a running stack: the assignment is the same everywhere, takes effect, and is logged."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest

from services.contracts import recommend_pb2 as pb
from services.contracts.experiments import Experiment, read_experiments
from tests.support.servers import HOST
from tests.support.stacks.stack import Stack, admitted
from tests.support.wait import wait_for

SURFACES = """
[home]
k = 5
deadline_ms = 4000
explore = { share = 0.5, position = 3, of = 20 }
[home-pinned]
rules = { pins = [{ item_id = "1682", position = 1 }] }
"""
EXPERIMENTS = """
[layers.ranking]
salt = "ranking-1"
[experiments.{name}]
layer = "ranking"
surfaces = ["home"]
share = 1.0
[experiments.{name}.variants.control]
[experiments.{name}.variants.pinned]
rules = "home-pinned"
deadline_ms = 3000
tiers = ["student"]
"""
NUM_AGREEING = 30
"""The number of consecutive answers that reach every replica."""


@pytest.fixture
def experiment(stack: Stack) -> Iterator[Experiment]:
    """The experiment, active at every gateway; afterwards both files are restored."""
    surfaces, experiments = stack.settings.surfaces_file, stack.settings.experiments_file
    assert surfaces is not None
    assert experiments is not None
    before = surfaces.read_text()
    surfaces.write_text(SURFACES)
    name = f"pinned-{uuid.uuid4().hex[:8]}"  # the log may contain requests of earlier runs
    experiments.write_text(EXPERIMENTS.format(name=name))
    ports = (*[stack.settings.http_port] * NUM_AGREEING, stack.settings.standby_http_port)
    wait_for(lambda: all(on_home(stack, "u", port) for port in ports), what="the experiment at every gateway")
    yield read_experiments(experiments).by_name[name]
    experiments.write_text("")
    surfaces.write_text(before)
    wait_for(lambda: not any(on_home(stack, "u", port) for port in ports), what="its end at every gateway")


def on_home(stack: Stack, user_id: str, port: int) -> dict[str, str]:
    """Return a user's variants on the surface home, from the REST port."""
    address = f"http://{HOST}:{port}/v1/assignment"
    surfaces = httpx.get(address, params={"user_id": user_id}, timeout=20.0).json()["surfaces"]
    variants: dict[str, str] = next((surface["variants"] for surface in surfaces if surface["surface"] == "home"), {})
    return variants


def logged(stack: Stack, kind: str, request_ids: set[str]) -> list[dict[str, Any]]:
    """Return the impressions or interactions of these requests once the worker has written one of each."""
    folder: Path = stack.settings.offline_log_dir / kind
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        return []
    table = pl.concat([pl.read_parquet(file, hive_partitioning=False) for file in files], how="diagonal_relaxed")
    rows = table.filter(pl.col("request_id").is_in(list(request_ids))).unique("request_id")
    return rows.to_dicts() if len(rows) == len(request_ids) else []


def test_a_variant_is_the_same_everywhere_and_is_in_the_log(
    stack: Stack, experiment: Experiment, tmp_path: Path
) -> None:
    """REST, gRPC and standby assign alike; rules, deadline, tiers, explanation, impression and report agree."""
    users, answers = [f"{experiment.name}-{number}" for number in range(16)], dict[str, dict[str, Any]]()
    for user_id in users:
        expected = {experiment.name: experiment.variant_of(user_id)}
        surfaces = stack.rpc.Assign(pb.AssignRequest(user_id=user_id)).surfaces

        assert on_home(stack, user_id, stack.settings.http_port) == expected
        assert [dict(surface.variants) for surface in surfaces if surface.surface == "home"] == [expected]
        assert on_home(stack, user_id, stack.settings.standby_http_port) == expected
        request_id = uuid.uuid4().hex
        answer = answers[request_id] = stack.recommend(user_id, surface="home", request_id=request_id)
        first = answer["items"][0]["item_id"]
        assert admitted(lambda u=user_id, i=first, r=request_id: stack.click(u, i, request_id=r)).is_success  # type: ignore[misc]

    variants = {request_id: experiment.variant_of(user) for request_id, user in zip(answers, users, strict=True)}
    for request_id, answer in answers.items():
        is_pinned = variants[request_id] == "pinned"
        assert answer["deadline_ms"] == (3_000 if is_pinned else 4_000)
        assert (answer["items"][0]["item_id"] == "1682") == is_pinned
    pinned = next(request_id for request_id, variant in variants.items() if variant == "pinned")
    explained = wait_for(
        lambda: (response := stack.rest.get(f"/v1/explanations/{pinned}")).is_success and response.json(),
        what="it is kept",
    )
    impressions = wait_for(lambda: logged(stack, "impressions", set(answers)), what="the impressions in the log")

    assert explained["variant"] == f"{experiment.name}=pinned"
    assert {impression["request_id"]: impression["variant"] for impression in impressions} == {
        request_id: f"{experiment.name}={variant}" for request_id, variant in variants.items()
    }
    for impression in impressions:
        assert impression["propensity"] is not None
        assert impression["propensity"][2] in (pytest.approx(0.5 / 18), pytest.approx(0.5 / 18 + 0.5))
    wait_for(lambda: logged(stack, "interactions", set(answers)), what="the clicks in the log")
    log = stack.settings.offline_log_dir
    joined = stack.command("experiment", "join", str(log / "impressions"), str(log / "interactions"), str(tmp_path))
    assert joined.returncode == 0, joined.stderr
    file = tmp_path / "report.json"
    report = (
        "--experiment",
        experiment.name,
        "--experiments",
        str(stack.settings.experiments_file),
        "--json",
        str(file),
    )
    reported = stack.command("experiment", "report", str(tmp_path), *report)
    assert reported.returncode == 0, reported.stderr
    assert {row["variant"]: (row["num_users"], row["clicks"]) for row in json.loads(file.read_text())["variants"]} == {
        variant: (list(variants.values()).count(variant), 1.0) for variant in ("control", "pinned")
    }
