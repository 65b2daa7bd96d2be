"""The console's release page in a real browser on the real stack: the bundle store records each step of a release."""

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from models.registry.canary import CanaryStage
from models.registry.release_report import GuardReport, ReleaseReport
from models.registry.store import BundleStore
from tests.support.gateway.browser import FAINT, LAYOUTS, NAMELESS, TOO_WIDE, chromium, quiet_page
from tests.support.stacks.stack import Stack

WAIT_MS = 90_000
COPY = "candidate-of-a-test"
GUARDS = (
    GuardReport(name="latency:llm", state="no worse", worse_by=-0.01, low=-0.03, high=0.01),
    GuardReport(name="clicks", state="open", worse_by=None, low=None, high=None, lacks="fewer than 100 users"),
)
REPORT = ReleaseReport(
    act="stay", outcome="continue", reason="the stage lasts 600 s more", users=(9, 800), lists=(12, 990), guards=GUARDS
).encode()


@pytest.fixture
def store(stack: Stack) -> Iterator[BundleStore]:
    """The stack's bundles with a copy of the live bundle, which is removed afterwards."""
    store = BundleStore.of(stack.settings)
    live = store.live()
    about = {key: value for key, value in live.manifest.items() if key not in {"version", "files"}}
    store.publish(live.path, COPY, about)
    yield store
    canary = store.record().canary
    if canary is not None:
        store.end_canary(canary.version)
    shutil.rmtree(stack.settings.bundle_root / COPY)


def confirm(page: Page, reason: str | None = None) -> None:
    """Answer the confirmation question."""
    if reason is not None:
        page.get_by_label("Why, for the record").fill(reason)
    page.get_by_role("dialog").get_by_role("button", name="Do it").click()


def test_a_release_is_begun_moved_and_ended(stack: Stack, store: BundleStore) -> None:
    """Answering no moves nothing; each move appears in the store's record and in the page's history."""
    live, withdrawn = store.live_version(), store.withdrawals()
    expect.set_options(timeout=WAIT_MS)
    with chromium() as browser, quiet_page(browser, base_url=str(stack.rest.base_url)) as page:
        page.goto("/")
        name = page.locator(".name[data-name='default']")
        name.get_by_label("Version").select_option(COPY)
        name.get_by_label("Shares of users").fill("1%:10m, 20%:1h")
        name.get_by_label("by hand").check()
        name.get_by_role("button", name="Release…").click()
        page.get_by_role("dialog").get_by_role("button", name="Leave it").click()
        assert store.record().canary is None
        name.get_by_role("button", name="Release…").click()
        confirm(page)

        expect(name.locator(".release")).to_contain_text(COPY)
        begun = store.record().canary
        assert begun is not None
        assert (begun.version, [stage.share for stage in begun.stages], begun.by_hand) == (COPY, [0.01, 0.2], True)
        name.get_by_role("button", name="On to 20").click()
        confirm(page)
        expect(name.locator(".stages [data-state='now']")).to_contain_text("20")
        name.get_by_role("button", name="End…").click()
        confirm(page, "seen enough")

        expect(name.get_by_role("button", name="Release…")).to_be_visible()
        record = store.record()
        assert (record.canary, record.live, record.withdrawn) == (None, live, withdrawn)
        assert [move.act for move in record.history[-3:]] == ["release", "share", "end"]
        assert record.history[-1].note.endswith("seen enough")
        name.locator("summary", has_text="History").click()
        expect(name.locator("details li").first).to_contain_text("seen enough")


@pytest.mark.parametrize(("width", "scheme"), LAYOUTS)
def test_a_release_under_way_is_legible_and_fits(stack: Stack, store: BundleStore, width: int, scheme: Any) -> None:
    """With the analysis guards shown, every control has a name, texts have contrast, and nothing overflows."""
    store.release(COPY, [CanaryStage(0.01, 600.0), CanaryStage(0.2, 3_600.0)], since_ms=253_402_300_799_999)
    store.report_canary(COPY, REPORT, round(time.time() * 1_000))
    viewport = {"width": width, "height": 900}
    expect.set_options(timeout=WAIT_MS)
    with (
        chromium() as browser,
        quiet_page(browser, viewport=viewport, base_url=str(stack.rest.base_url), color_scheme=scheme) as page,
    ):
        page.goto("/")
        expect(page.locator(".guards tbody tr")).to_have_count(len(GUARDS))
        expect(page.locator(".name .outcome")).to_contain_text("none yet: the stage lasts 600 s more")
        page.locator(".releases summary").last.click()

        assert page.evaluate(NAMELESS) == []
        assert page.evaluate(FAINT) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(TOO_WIDE) == []
