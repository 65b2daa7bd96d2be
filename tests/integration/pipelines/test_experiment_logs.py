"""Impressions written by the gateway, joined and reported by `tailrace experiment` against known truth."""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from services.contracts.erasure import Erasure
from services.contracts.events import Impression, Interaction, decode_impression
from services.contracts.experiments import read_experiments, variant_in
from services.errors import DependencyUnavailable
from services.features.schema import LogPosition
from services.stream.decode import LoggedErasure, LoggedImpression, LoggedInteraction
from services.stream.log.kinds import IMPRESSIONS
from services.stream.log.offline_log import OfflineLog
from tests.support.wait import until
from tests.unit.gateway.world import NOW_S, NUM_ITEMS, started_world, user

SURFACES = """
[home]
k = 4
explore = { share = 0.5, position = 2, of = 7 }
[home-even]
rules = { blocks = [{ key = "categories", eq = "odd" }] }
[cart]
k = 4
"""
EXPERIMENTS = """
[layers.ranking]
salt = "ranking-1"
[experiments.even]
layer = "ranking"
surfaces = ["home"]
share = 1.0
[experiments.even.variants.control]
[experiments.even.variants.even]
rules = "home-even"
"""
NUM_USERS, NUM_REQUESTS, POSITION, OF, K = 400, 6, 2, 7, 4
HISTORY = ("i00", "i01", "i02", "i03")
RATES = np.where(np.arange(NUM_ITEMS) % 2 == 0, 0.3, 0.1) + np.arange(NUM_ITEMS) % 5 / 20
"""The click rate of an item in any position."""
NOW_MS = int(NOW_S * 1_000)


@dataclass(frozen=True)
class Shown:
    """A folder with log, experiments.toml and joined table; impressions, and explored candidates by request."""

    folder: Path
    impressions: tuple[Impression, ...]
    drawable: Mapping[str, tuple[str, ...]]


def rate(item_id: str) -> float:
    return float(RATES[int(item_id[1:])])


def ranked(*, by_llm: bool, even: bool) -> list[str]:
    """Return the first `OF` items of the fakes' ranking for these users, by definition."""
    order = range(4, NUM_ITEMS) if by_llm else range(NUM_ITEMS - 1, 3, -1)
    return [f"i{index:02}" for index in order if not even or index % 2 == 0][:OF]


def run(*arguments: object) -> str:
    """Run `tailrace experiment` and return its output."""
    done = CliRunner().invoke(app, ["experiment", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def report(shown: Shown, *arguments: object) -> dict[str, Any]:
    """Return the figures of a report."""
    run("report", shown.folder / "joined", *arguments, "--json", shown.folder / "report.json")
    content: dict[str, Any] = json.loads((shown.folder / "report.json").read_text())
    return content


def logs(folder: Path) -> tuple[OfflineLog[LoggedImpression], OfflineLog[LoggedInteraction]]:
    """The logs of impressions and interactions, dated when the plane answers."""
    return OfflineLog(folder / "log", lambda: NOW_S, IMPRESSIONS), OfflineLog(folder / "log", lambda: NOW_S)


def join(folder: Path) -> str:
    return run("join", folder / "log/impressions", folder / "log/interactions", folder / "joined")


async def answered(folder: Path) -> tuple[Impression, ...]:
    """Return the impressions of a plane that answers 400 users on two surfaces.

    For every third request the LLM fails, so that the student ranks instead.
    """
    surfaces, experiments = folder / "surfaces.toml", folder / "experiments.toml"
    surfaces.write_text(SURFACES)
    experiments.write_text(EXPERIMENTS)
    random.seed(29)
    async with started_world(folder, surfaces_file=surfaces, experiments_file=experiments) as world:
        world.features.users |= {f"user-{number}": user(*HISTORY) for number in range(NUM_USERS)}
        for number in range(NUM_USERS):
            for index in range(NUM_REQUESTS):
                world.llm.error = DependencyUnavailable("llm", 1.0) if index % 3 == 0 else None
                if index % 3 == 0:
                    world.llm.names = (f"fresh-{number}-{index}",)  # whose breaker is closed
                surface = "home" if index % 2 == 0 else "cart"
                await world.recommend(f"user-{number}", request_id=f"{number}-{index}", surface=surface, k=None)
        await until(lambda: len(world.impressions.records) == NUM_USERS * NUM_REQUESTS)
        return tuple(decode_impression(value) for _, value in world.impressions.records)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """The impressions in the log files, and clicks by the items' rates; both joined."""
    folder = tmp_path_factory.mktemp("experiment")
    lists = asyncio.run(answered(folder))
    impressions, interactions = logs(folder)
    impressions.append(
        [LoggedImpression(impression, LogPosition("t", 0, offset)) for offset, impression in enumerate(lists)]
    )
    rng, clicks = np.random.default_rng(29), []
    for impression in lists:
        for item_id in impression.item_ids:
            if rng.random() < rate(item_id):
                event = {"event_id": f"e{len(clicks)}", "user_id": impression.user_id, "item_id": item_id}
                named = {"event_time_ms": NOW_MS + 1_000, "request_id": impression.request_id}
                clicks.append(Interaction(**event, **named))
    interactions.append([LoggedInteraction(click, LogPosition("e", 0, offset)) for offset, click in enumerate(clicks)])
    join(folder)
    drawable = {
        impression.request_id: tuple(
            ranked(by_llm=impression.tier == "llm", even=variant_in(impression.variant, "even") == "even")[
                POSITION - 1 :
            ]
        )
        for impression in lists
        if impression.surface == "home"
    }
    return Shown(folder, lists, drawable)


def policy(shown: Shown, surface: str) -> Path:
    """Write the probabilities of a policy that draws the explored position uniformly and otherwise equals the log."""
    path = shown.folder / f"{surface}.parquet"
    rows = [
        {"request_id": impression.request_id, "probability": 1 / len(shown.drawable.get(impression.request_id, ("",)))}
        for impression in shown.impressions
        if impression.surface == surface
    ]
    pl.DataFrame(rows).write_parquet(path)
    return path


def clicks_expected(list_ids: list[str]) -> float:
    return sum(map(rate, list_ids))


def with_drawn(order: list[str], item_id: str) -> list[str]:
    """Return the list with this item and the item at the explored position swapped."""
    at = order[POSITION - 1]
    return [{at: item_id, item_id: at}.get(listed, listed) for listed in order][:K]


def test_lists_that_explore_have_propensities_and_others_have_none(shown: Shown) -> None:
    """For each tier and variant, drawn items were candidates with the recorded probability; all of both occur."""
    kinds = set()
    for impression in shown.impressions:
        if impression.surface == "cart":
            assert (impression.propensity, impression.variant) == (None, None)
            continue
        may = shown.drawable[impression.request_id]
        drawn = impression.item_ids[POSITION - 1]
        assert impression.propensity is not None
        assert drawn in may
        expected = 0.5 / len(may) + (0.5 if drawn == may[0] else 0.0)
        assert impression.propensity == pytest.approx((1.0, expected, 1.0, 1.0))
        kinds.add((impression.tier, impression.variant))

    assert kinds == {(tier, f"even={variant}") for tier in ("llm", "student") for variant in ("control", "even")}


def test_a_policy_that_draws_more_is_estimated_from_what_was_explored(shown: Shown) -> None:
    """The IPS interval contains the policy's true clicks per list, and not the log's; the support is complete."""
    home = [impression for impression in shown.impressions if impression.surface == "home"]
    true = np.mean(
        [
            np.mean(
                [
                    clicks_expected(
                        with_drawn(
                            ranked(by_llm=impression.tier == "llm", even=impression.variant == "even=even"), item_id
                        )
                    )
                    for item_id in shown.drawable[impression.request_id]
                ]
            )
            for impression in home
        ]
    )

    estimates = report(shown, "--off-policy", policy(shown, "home"), "--surface", "home")["off_policy"]

    assert estimates["refusal"] == ""
    assert estimates["num_lists"] == len(home)
    for name in ("ips", "snips"):
        assert estimates[name]["low"] < true < estimates[name]["high"]
    assert not estimates["logged"]["low"] < true < estimates["logged"]["high"]
    assert estimates["support"]["low"] < 1 < estimates["support"]["high"]
    assert estimates["effective_lists"] < estimates["num_lists"]


def test_a_surface_that_does_not_explore_is_refused(shown: Shown) -> None:
    """The surface's log is deterministic; both surfaces together lack one surface's propensities."""
    cart = report(shown, "--off-policy", policy(shown, "cart"), "--surface", "cart")["off_policy"]
    both = shown.folder / "both.parquet"
    pl.concat(pl.read_parquet(policy(shown, name)) for name in ("home", "cart")).write_parquet(both)

    assert cart["refusal"].startswith("the log is deterministic: no list was drawn at random")
    assert cart["ips"] is None
    assert report(shown, "--off-policy", both)["off_policy"]["refusal"].startswith("50.0% of the lists have no propens")


def test_the_experiment_s_report_holds_the_truth(shown: Shown) -> None:
    """Users are divided as the file says, without mismatch, and the interval holds the true difference in clicks."""
    file = shown.folder / "experiments.toml"
    experiment = read_experiments(file).by_name["even"]
    of_users = {f"user-{number}": experiment.variant_of(f"user-{number}") for number in range(NUM_USERS)}
    home = [impression for impression in shown.impressions if impression.surface == "home"]
    true = {
        variant: np.mean(
            [
                clicks_expected(list(impression.item_ids))
                for impression in home
                if of_users[impression.user_id or ""] == variant
            ]
        )
        for variant in ("control", "even")
    }

    result = report(shown, "--experiment", "even", "--experiments", file)

    assert {row["variant"]: row["num_users"] for row in result["variants"]} == {
        variant: list(of_users.values()).count(variant) for variant in ("control", "even")
    }
    (clicks,) = [difference for difference in result["differences"] if difference["metric"] == "clicks"]
    assert result["mismatch"]["p_value"] > 0.01
    assert clicks["low"] < true["even"] - true["control"] < clicks["high"]
    assert clicks["low"] > 0


def test_reports_name_nobody_and_erased_users_leave(shown: Shown) -> None:
    """No form of the report contains a user ID. After an erasure the log and a new join lack the user."""
    folder, erased = shown.folder, "user-7"
    page = folder / "report.md"
    shared = ("report", folder / "joined", "--experiment", "even", "--segment", "surface")
    printed = run(*shared, "--markdown", page, "--json", folder / "report.json")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name.startswith("report")]
    written = printed + "".join(file.read_text() for file in files if file.suffix in {".md", ".json"})
    before = pl.read_parquet(folder / "joined")

    erasure = Erasure(erasure_id="x", user_id=erased, accepted_time_ms=NOW_MS + 2_000)
    logs(folder)[0].ledger.append([LoggedErasure(erasure, LogPosition("e", 0, 10**6))], ["t", "e"])
    for log in logs(folder):
        log.erase(0)
    join(folder)
    after = pl.read_parquet(folder / "joined")

    assert "user-" not in written
    assert erased in before["user_id"].to_list()
    assert after.sort(after.columns).equals(before.filter(pl.col("user_id") != erased).sort(after.columns))
