"""A headless Chromium for tests, driven by Playwright; the browser itself comes from the system."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser; skips the test where the machine has none."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


@contextmanager
def quiet_page(browser: Browser, **options: Any) -> Iterator[Page]:
    """Open a page in a fresh profile, and fail at the end if it ever logged an error.

    Chromium logs one for every 503, which is how the history is answered while the feature store is switched off.
    """
    context = browser.new_context(**options)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if _is_complaint(message) else None)
    yield page
    context.close()
    assert not complaints, complaints


def _is_complaint(message: ConsoleMessage) -> bool:
    is_store_away = "status of 503" in message.text and "/console/history" in message.location["url"]
    return message.type == "error" and not is_store_away
