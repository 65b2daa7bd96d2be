"""A headless system Chromium driven by Playwright, and checks of a page: names, structure, contrast, width."""

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
LAYOUTS = [
    (390, "dark"),
    (1280, "light"),
    pytest.param(390, "light", marks=pytest.mark.grid),
    pytest.param(1280, "dark", marks=pytest.mark.grid),
]
"""Widths in pixels with colour schemes; layout depends on the width and contrast on the scheme, so two
pairs suffice.
"""

NAMELESS = """() => [...document.querySelectorAll("button, a[href], input, canvas, dialog, [role]:not([role=status]), [tabindex='0']")]
  .filter((element) => {
    const labelled = (element.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join("")
    const name = [element.getAttribute("aria-label"), labelled, element.textContent, ...[...(element.labels ?? [])].map((label) => label.textContent)]
    return !name.some((text) => text?.trim())
  }).map((element) => element.outerHTML.slice(0, 120))"""
"""Elements that a screen reader could not name."""

STRUCTURE = """() => ({
  lang: document.documentElement.lang,
  landmarks: ["header", "main", "footer", "nav"].map((name) => document.querySelectorAll(name).length),
  levels: [...document.querySelectorAll("h1, h2, h3")].filter((one) => !one.closest("dialog")).map((one) => Number(one.tagName[1])),
  doubled: [...document.querySelectorAll("[id]")].map((one) => one.id).filter((id, place, all) => all.indexOf(id) !== place),
  dangling: [...document.querySelectorAll("[aria-labelledby], label[for]")]
    .flatMap((one) => (one.getAttribute("aria-labelledby") ?? one.htmlFor).split(" ")).filter((id) => !document.getElementById(id)),
  unnamedImages: [...document.images].filter((image) => !image.hasAttribute("alt")).length,
  live: document.querySelectorAll("[aria-live=polite]").length,
})"""
"""The page's structure."""

FAINT = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number)
  const rgb = (text) => { const [r, g, b, a = 1] = text.startsWith("color(srgb") ? parse(text.slice(10)).map((n, i) => i < 3 ? 255 * n : n) : parse(text); return { r, g, b, a } }
  const over = (top, under) => ({ r: top.r * top.a + under.r * (1 - top.a), g: top.g * top.a + under.g * (1 - top.a), b: top.b * top.a + under.b * (1 - top.a), a: 1 })
  const light = ({ r, g, b }) => [r, g, b].map((n) => n / 255).map((n) => n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4)
    .reduce((sum, n, i) => sum + n * [0.2126, 0.7152, 0.0722][i], 0)
  const ground = (element) => {
    const layers = []
    for (let one = element; one; one = one.parentElement) layers.push(rgb(getComputedStyle(one).backgroundColor))
    return layers.reverse().reduce((under, top) => over(top, under), { r: 255, g: 255, b: 255, a: 1 })
  }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  const found = []
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement
    if (!node.textContent.trim() || !element.checkVisibility() || element.closest(".visually-hidden, script, dialog:not([open])")) continue
    const back = ground(element)
    const ink = over(rgb(getComputedStyle(element).color), back)
    const [high, low] = [light(ink), light(back)].sort((a, b) => b - a)
    const ratio = (high + 0.05) / (low + 0.05)
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${element.className} ${node.textContent.trim().slice(0, 40)}`)
  }
  return found
}"""
"""Texts with a contrast under 4.5 to 1 against their background (WCAG 2.2, AA)."""

TOO_WIDE = """() => [...document.querySelectorAll("body *")].filter((element) => {
  const box = element.getBoundingClientRect()
  return box.width > 0 && box.right > innerWidth + 1 && !element.closest(".scroll, .visually-hidden, .skip")
}).map((element) => element.outerHTML.slice(0, 100))"""
"""Elements that overflow the window."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser. Skips the test on a machine without one."""
    path = next((program for name in NAMES if (program := shutil.which(name))), None)
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

    Chromium logs an error for every 503, which the history returns while the feature store is switched off.
    """
    context = browser.new_context(**options)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if _is_error(message) else None)
    yield page
    context.close()
    assert not errors, errors


def _is_error(message: ConsoleMessage) -> bool:
    is_store_unavailable = "status of 503" in message.text and "/console/history" in message.location["url"]
    return message.type == "error" and not is_store_unavailable
