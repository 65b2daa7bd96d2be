"""The console in a real browser on the real stack."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import APIResponse, Browser, Page, Route, expect

from services.gateway.drills import DrillTarget
from tests.support.gateway.browser import FAINT, NAMELESS, STRUCTURE, TOO_WIDE, chromium, quiet_page
from tests.support.stacks.stack import Stack, new_user_id, rest_items
from tests.support.wait import wait_for

WAIT_MS = 60_000
WIDE = {"width": 1400, "height": 1000}
NUM_MODELS = 6
NUM_CLICKS = 4
BUSY_NODE = """async () => {
  const shown = await (await fetch("/console/live")).json()
  const { showSlos } = await import("/console/page/slo.js")
  showSlos(shown.slos.map((slo) => ({ ...slo, good_share: 0.99949, budget_left: -1, num_total: 123456789 })), 3600)
}"""
"""Shows the SLO tiles as on a node with very many answers."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests in this file."""
    expect.set_options(timeout=WAIT_MS)
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    """The open console with its first list; afterwards no drill is active."""
    with quiet_page(browser, viewport=WIDE, base_url=address(stack)) as opened:
        opened.goto("/")
        expect(items(opened)).to_have_count(10)
        yield opened
        end_drills(stack)


def end_drills(stack: Stack) -> None:
    """Switch all parts on, and wait until each gateway has read it: one that has not answers the next page with 503."""
    stack.rest.post("/console/drills", json=dict.fromkeys(DrillTarget, "on"))

    def are_over() -> bool:
        answers = [stack.rest.get("/console/history", params={"user_id": "196"}) for _ in range(20)]
        return all(answer.status_code == 200 for answer in answers)

    wait_for(are_over, what="the store in all gateways")


def address(stack: Stack) -> str:
    return str(stack.rest.base_url)


def items(page: Page) -> Any:
    return page.locator("#items > li")


def titles(page: Page) -> list[str]:
    return [text.strip() for text in page.locator("#items .title").all_inner_texts()]


def item_ids(page: Page) -> list[str]:
    """Return the item IDs in the list. Titles are not unique: films that were released twice share a title."""
    return [str(item.get_attribute("data-item")) for item in items(page).all()]


def choose(page: Page, user_id: str) -> None:
    """Enter a user id and wait for the answer."""
    page.get_by_label("or a user id").fill(user_id)
    page.get_by_role("button", name="Go", exact=True).click()
    expect(page.locator("#history-title")).to_have_text(f"History of {user_id}")
    expect(page.locator("#items")).to_have_attribute("data-user", user_id)
    expect(items(page)).to_have_count(10)


def until_tier(page: Page, name: str) -> None:
    """Request again until this tier answers."""

    def shown() -> bool:
        page.get_by_role("button", name="Request again").click()
        page.wait_for_timeout(100)
        return page.locator("#tier").inner_text() == name

    wait_for(shown, WAIT_MS / 1_000, f"an answer by {name}")


def known_user(stack: Stack) -> str:
    """Create a user with a history long enough for the language model and without a stored list."""
    user_id = new_user_id()
    for item_id in rest_items(stack.recommend(user_id))[:NUM_CLICKS]:
        stack.sees_click(user_id, item_id)
    return user_id


def history(stack: Stack, user_id: str) -> list[dict[str, Any]]:
    """Return the user's history from the console's API, newest first."""
    answer = stack.rest.get("/console/history", params={"user_id": user_id})
    return list(answer.raise_for_status().json()["items"])


def test_the_page_shows_user_answer_and_numbers(page: Page, stack: Stack) -> None:
    """The first view has a user, a history with titles, an answer with tier and reason, and all figures."""
    chip = page.locator("#users .chip").first
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "true")
    user_id = str(chip.get_attribute("data-user"))
    expect(page.locator("#history-title")).to_have_text(f"History of {user_id}")
    expect(page.locator("#history > li").first).to_be_visible()

    listed = history(stack, user_id)
    assert page.locator("#history .title").all_inner_texts() == [" ".join(item["title"].split()) for item in listed]
    assert any(item["title"] != item["item_id"] for item in listed), "the history shows ids instead of titles"
    assert re.search(r"\d{4}|ago|just now", page.locator("#history > li small").first.inner_text())
    assert page.locator("#tier").inner_text() in {"Stored list", "Language model", "Student", "Popular"}
    assert len(page.locator("#reason").inner_text()) > 20
    assert page.locator("#timeline .lanes li").count() >= 3
    assert "of 200 ms" in page.locator("#timeline .budget").inner_text()
    assert all(page.locator("#items .score").all_inner_texts())
    assert all(page.locator("#items .source").all_inner_texts())
    expect(page.locator("#models tbody tr")).to_have_count(NUM_MODELS)
    expect(page.locator("#gain tbody tr").first).to_contain_text("the LLM")
    expect(page.locator("#slos .tile").nth(4)).to_be_visible()
    expect(page.locator("#pulse")).to_have_attribute("data-state", "on")


def test_a_click_is_an_event_and_the_list_changes(page: Page, stack: Stack) -> None:
    """The next answer reflects the click after a displayed time; the clicked item leaves, and the history grows."""
    choose(page, known_user(stack))
    clicked, title = item_ids(page)[1], titles(page)[1]

    items(page).nth(1).get_by_role("button").click()
    expect(page.locator("#click-note")).to_contain_text(re.compile(r"seen after \d+ ms"))
    expect(page.locator("#history > li").first).to_contain_text(title)

    assert clicked not in item_ids(page)
    assert page.locator("#items .moved:not(:empty)").count() >= 1, "no new item is marked"
    expect(page.locator("#history-note")).to_contain_text("5 events")
    expect(page.locator("#live")).to_contain_text("was seen after")


def test_switching_parts_off_shifts_the_tiers(page: Page, browser: Browser, stack: Stack) -> None:
    """The student replaces the LLM, and popularity the feature store; all windows and replicas follow the switch."""
    choose(page, known_user(stack))
    until_tier(page, "Language model")

    page.get_by_role("switch", name="Language model").click()
    expect(page.locator("#tier")).to_have_text("Student")
    expect(page.locator("#reason")).to_contain_text("unavailable")
    with quiet_page(browser, viewport=WIDE, base_url=address(stack)) as other:
        other.goto("/")
        for window in (page, other):
            expect(window.locator("#switch-llm")).to_have_attribute("aria-checked", "false")
        expect(other.locator("#switch-llm small")).to_contain_text("back in")
    agreed = {("llm",)}
    wait_for(
        lambda: {tuple(stack.rest.get("/console/live").json()["drills"]) for _ in range(6)} == agreed,
        what="the drill at every gateway",
    )
    page.get_by_role("switch", name="Language model").click()
    until_tier(page, "Language model")

    page.get_by_role("switch", name="Feature store").click()
    until_tier(page, "Popular")
    expect(page.locator("#history-note")).to_contain_text("The feature store is unavailable")
    page.get_by_role("switch", name="Feature store").click()
    until_tier(page, "Language model")
    expect(page.locator("#history > li")).to_have_count(NUM_CLICKS)


def test_a_history_read_before_the_store_was_switched_off_is_not_shown_after(page: Page, stack: Stack) -> None:
    """An answer in flight during the switch does not hide that the store is unavailable."""
    choose(page, known_user(stack))
    until_tier(page, "Language model")
    held: list[tuple[Route, APIResponse]] = []
    page.route("**/console/history**", lambda route: held.append((route, route.fetch())))

    page.get_by_role("switch", name="Language model").click()
    while not held:
        page.wait_for_timeout(50)
    page.get_by_role("switch", name="Feature store").click()
    expect(page.locator("#history-note")).to_contain_text("The feature store is unavailable")
    (route, read), *_ = held
    with page.expect_response("**/console/history**"):
        route.fulfill(response=read)
    page.wait_for_timeout(200)

    expect(page.locator("#history-note")).to_contain_text("The feature store is unavailable")
    page.unroute("**/console/history**")
    for name in ("Language model", "Feature store"):
        page.get_by_role("switch", name=name).click()
    until_tier(page, "Language model")


def test_the_sliders_set_deadline_and_load(page: Page) -> None:
    """The next answer has the chosen deadline; requests are sent at the chosen rate, counted and plotted."""
    page.get_by_role("slider", name="Deadline").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#timeline .budget")).to_contain_text("of 500 ms")
    assert page.locator("#deadline-out").inner_text() == "500 ms"

    page.get_by_role("slider", name="Load").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#load-note")).to_contain_text(re.compile(r"[1-9]\d+ answered"))
    expect(page.locator("#mix-text")).to_contain_text(re.compile(r"[1-9]"))
    page.get_by_role("slider", name="Load").press("Home")

    assert page.locator("#load-out").inner_text() == "off"
    for chart in ("mix", "latency"):
        inks = page.evaluate(
            "(id) => { const c = document.getElementById(id); const d = c.getContext('2d').getImageData(0, 0, "
            "c.width, c.height).data; return new Set(Array.from({ length: d.length / 4 }, (_, i) => d[4 * i + 3] && "
            "(d[4 * i] << 16 | d[4 * i + 1] << 8 | d[4 * i + 2]))).size }",
            chart,
        )
        assert inks > 10, f"{chart} is blank"


def test_the_keyboard_reaches_everything(page: Page, stack: Stack) -> None:
    """The skip link comes first, focus is visible, shortcuts are listed and off in text fields; `n` adds a user."""
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "answer"

    choose(page, known_user(stack))
    first = titles(page)[0]
    page.get_by_role("button", name="Request again").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#items') !== null")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("1")
    expect(page.locator("#history > li").first).to_contain_text(first)

    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_be_visible()
    assert page.locator("#shortcuts dt").count() == page.locator("#shortcuts dd").count() >= 8
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_be_hidden()

    shown = page.locator("#history-title").inner_text()
    page.get_by_label("or a user id").focus()
    page.keyboard.type("nlf1")
    assert page.locator("#history-title").inner_text() == shown
    page.get_by_label("or a user id").blur()
    page.keyboard.press("n")
    expect(page.locator("#history-title")).not_to_have_text(shown)
    expect(page.locator("#tier")).to_have_text("Popular")
    expect(page.locator("#history-note")).to_contain_text("No events yet")


def test_a_search_shows_what_was_understood(page: Page) -> None:
    """The search box finds titles despite typing errors, says what a wish excludes, and empty brings the list back."""
    recommended = item_ids(page)
    page.keyboard.press("/")
    page.keyboard.type("an old comedy, nothing romantic")
    page.keyboard.press("Enter")
    expect(page.locator("#understood")).to_have_text("Understood: Comedy, old; not Romance.")
    page.get_by_role("searchbox").fill("toy stry")
    page.keyboard.press("Enter")
    expect(items(page).first).to_contain_text("Toy Story")

    page.get_by_role("searchbox").fill("")
    page.keyboard.press("Enter")
    expect(page.locator("#understood")).to_be_hidden()
    assert len(item_ids(page)) == len(recommended)


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.grid), "dark"])
def test_the_page_is_accessible(browser: Browser, stack: Stack, scheme: Any) -> None:
    """Every control has a name; landmarks, heading order and a contrast of 4.5 to 1 hold in both colour schemes."""
    with quiet_page(browser, viewport=WIDE, base_url=address(stack), color_scheme=scheme) as page:
        page.goto("/")
        expect(items(page)).to_have_count(10)
        expect(page.locator("#slos .tile").nth(4)).to_be_visible()
        expect(page.locator("#models tbody tr")).to_have_count(NUM_MODELS)
        made = page.evaluate(STRUCTURE)

        assert page.evaluate(NAMELESS) == []
        assert page.evaluate(FAINT) == []
        assert (made["lang"], made["landmarks"], made["live"]) == ("en", [1, 1, 1, 1], 1)
        assert (made["doubled"], made["dangling"], made["unnamedImages"]) == ([], [], 0)
        assert made["levels"][0] == 1
        assert all(after - before <= 1 for before, after in zip(made["levels"], made["levels"][1:], strict=False))
        is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 60")
        assert is_dark == (scheme == "dark")


@pytest.mark.parametrize("width", [320, *(pytest.param(width, marks=pytest.mark.grid) for width in (768, 1920))])
def test_nothing_overflows_at_any_width(browser: Browser, stack: Stack, width: int) -> None:
    """The page does not scroll sideways, from a small phone to a wide screen."""
    with quiet_page(browser, viewport={"width": width, "height": 800}, base_url=address(stack)) as page:
        page.goto("/")
        expect(items(page)).to_have_count(10)
        expect(page.locator("#slos .tile").nth(4)).to_be_visible()
        expect(page.locator("#models tbody tr")).to_have_count(NUM_MODELS)

        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(TOO_WIDE) == []
        assert page.evaluate(f"async () => {{ await ({BUSY_NODE})(); return ({TOO_WIDE})() }}") == []


def test_a_key_is_requested_when_one_is_needed(browser: Browser, stack: Stack) -> None:
    """A 401 opens a dialog; the key is then sent with every call and kept only in this tab."""

    def keyed(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer let-me-in":
            route.continue_()
        else:
            error = {"code": "unauthenticated", "message": "no", "field": None, "fix": None, "request_id": "r"}
            route.fulfill(status=401, json={"error": error})

    context = browser.new_context(viewport=WIDE, base_url=address(stack))
    page = context.new_page()
    page.route(re.compile(r"/(v1|console/(?!page))"), keyed)
    page.goto("/")
    expect(page.get_by_role("dialog", name="This service needs an API key")).to_be_visible()
    page.get_by_label("API key", exact=True).fill("let-me-in")
    page.get_by_role("button", name="Use key").click()
    expect(items(page)).to_have_count(10)
    expect(page.locator("#pulse")).to_have_attribute("data-state", "on")
    kept = page.evaluate(
        "[Object.values(sessionStorage).includes('let-me-in'), Object.values(localStorage).includes('let-me-in')]"
    )
    context.close()

    assert kept == [True, False]
