"""The console's page and its data: users, histories, the bundle, live numbers, drills."""

import asyncio
import fcntl
import os
import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.gateway.console.door import PAGE_DIR, load_page
from services.gateway.console.samples import MetricSampler
from services.gateway.console.slo import series_for
from services.gateway.drills import DrillTarget, read_drills
from services.observability.node_metrics import node_registry
from services.observability.objectives import load_objectives
from tests.support.gateway.keys import bearer
from tests.support.wait import until
from tests.unit.gateway.console.conftest import Console
from tests.unit.gateway.world import catalogue_of, publish


async def test_the_page_is_served_with_strict_headers(console: Console) -> None:
    """The headers allow only our own scripts and no framing, sniffing or referrer; unknown files are a 404."""
    answer = await console.http.get("/")
    others = [
        await console.http.get(f"/console/page/{name}")
        for name in ("nothing.js", "..%2fdoor.py", "__init__.py", "index.html%00")
    ]

    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert {(other.status_code, other.json()["error"]["code"]) for other in others} == {(404, "not_found")}


def test_the_page_loads_nothing_from_elsewhere_and_inlines_nothing() -> None:
    """Every address is local; the page has no inline script, style or handler, and builds no HTML from text."""
    html = (PAGE_DIR / "index.html").read_text()
    addresses = re.findall(r"""(?:src|href)="([^"]+)\"""", html)
    everything = {name: file.body.decode() for name, file in load_page().items()}
    imports = [name for text in everything.values() for name in re.findall(r'from "(.+?)"', text)]

    assert all(address.startswith(("/", "#")) and not address.startswith("//") for address in addresses)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", html)
    assert all(name.startswith("./") and name[2:] in everything for name in imports)
    for name, text in everything.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://(?!www\.w3)", text
        ), name


async def test_users_come_from_the_store(console: Console) -> None:
    """Users are the stored users, longest history first, without duplicates."""
    users = await console.send("GET", "/console/users")

    assert len({user["user_id"] for user in users["users"]}) == len(users["users"])
    assert users["users"][0] == {"user_id": "sated", "num_events": 20, "has_stored_list": False}
    assert {"user_id": "listed", "num_events": 3, "has_stored_list": True} in users["users"]


async def test_a_history_has_titles_and_times_newest_first(console: Console) -> None:
    """The newest item has the store's time, older items the offline table's; an empty user id is rejected."""
    history = await console.send("GET", "/console/history?user_id=long")
    nobody = await console.refused("GET", "/console/history?user_id=")

    items = history["items"]
    assert [item["title"] for item in items] == ["Item 3", "Item 2", "Item 1", "Item 0"]
    assert [item["event_time_ms"] for item in items] == [history["newest_event_time_ms"], 33, 22, 11]
    assert (items[0]["categories"], nobody["field"]) == (["odd"], "user_id")


async def test_the_bundle_has_its_evaluation(console: Console, tmp_path: Path) -> None:
    """Models have a fixed order, without models missing from the report; history slices show if they call the LLM."""
    publish(tmp_path / "bundles", "routed", catalogue_of(), llm_pays=[[10, None]])
    await console.world.plane.names.first.refresh()

    bundle = await console.send("GET", "/console/bundle")

    rows, gain = bundle["quality"]["rows"], bundle["quality"]["gain"]
    assert (bundle["version"], bundle["num_items"]) == ("routed", 20)
    assert [row["model"] for row in rows] == ["decoder", "popularity"]
    assert rows[0]["ndcg_interval"] == [0.2, 0.3]
    assert [(row["first"], row["last"], row["calls_llm"]) for row in gain] == [(0, 9, False), (10, None, True)]
    assert gain[1]["interval"] == [0.01, 0.03]


async def test_models_in_memory_are_listed_with_their_loads(console: Console) -> None:
    """A gateway without a memory limit lists each loaded name, without its size."""
    (model,) = (await console.send("GET", "/console/models"))["models"]

    assert (model["part"], model["name"], model["num_bytes"], model["num_loads"]) == ("gateway", "default", None, 1)
    assert (model["num_evicted_for_room"], model["num_evicted_idle"], model["has_failed"]) == (0, 0, False)


async def test_the_live_view_counts_answers(console: Console) -> None:
    """Answers between two samples are counted by tier."""
    await console.sampler.sample()
    for _ in range(3):
        await console.http.post("/v1/recommendations", json={"user_id": "listed", "k": 3})
    await console.sampler.sample()

    live = await console.send("GET", "/console/live")

    assert [slo["num_total"] for slo in live["slos"] if slo["name"] == "availability"] == [3]
    assert live["steps"][-1]["rates"]["precomputed"] > 0
    assert (live["drills"], live["default_deadline_ms"]) == ({}, 200)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b"{}", "body"),
        (b'{"moon": "off"}', "moon"),
        (b'{"llm": true}', "llm"),
        (b'{"llm": "off", "features": null}', "features"),
    ],
)
async def test_a_bad_drill_is_refused_whole(console: Console, body: bytes, field: str) -> None:
    """A bad request switches nothing, and the error names the field."""
    answer = await console.http.post("/console/drills", content=body)

    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)
    assert not any(console.drills.is_off(part) for part in DrillTarget)


async def test_a_switch_is_audited_even_if_its_caller_disconnects(console: Console, tmp_path: Path) -> None:
    """Ray Serve cancels a disconnected caller's task, possibly after the drill began."""
    with (tmp_path / "drills.lock").open("w") as lock, capture_logs() as logs:
        fcntl.flock(lock, fcntl.LOCK_EX)
        switching = asyncio.create_task(
            console.keyed.post("/console/drills", json={"llm": "off"}, headers=bearer("admin"))
        )
        for _ in range(10):  # threads take tasks in order: after these the switch waits for the lock
            await asyncio.to_thread(int)
        switching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await switching
    await until(lambda: read_drills(tmp_path / "drills.json"))

    (audited,) = [line for line in logs if line["event"] == "audit"]
    assert (audited["who"], audited["outcome"]) == ("admin", "gone")


async def test_an_unreadable_metrics_folder_skips_one_sample(tmp_path: Path) -> None:
    """A metrics file has a byte of its header only; the next sample succeeds without it."""
    cut = tmp_path / f"counter_{os.getpid()}.db"
    cut.write_bytes(b"\1")
    sampler = MetricSampler(lambda: node_registry(tmp_path).collect(), series_for(load_objectives()))
    await sampler.sample()
    cut.unlink()
    await sampler.sample()
    assert sampler.ring.window(60.0) is None, "one sample, not two"
    await sampler.sample()

    assert sampler.ring.window(60.0) is not None
