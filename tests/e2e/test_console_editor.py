"""The console's editor in a real browser on the real stack: REST and gRPC answers reflect each change."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.gateway.browser import FAINT, LAYOUTS, NAMELESS, TOO_WIDE, chromium, quiet_page
from tests.support.stacks.stack import Stack, new_user_id, rest_items
from tests.support.wait import wait_for

WAIT_MS = 90_000
WIDE = {"width": 1280, "height": 1000}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests in this file."""
    expect.set_options(timeout=WAIT_MS)
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    with quiet_page(browser, viewport=WIDE, base_url=str(stack.rest.base_url)) as opened:
        open_console(opened)
        yield opened


def open_console(page: Page) -> None:
    """Open the console and wait for the first list and the surfaces."""
    page.goto("/")
    expect(page.locator("#items > li")).to_have_count(10)
    expect(page.locator("#surfaces-read")).to_be_enabled()


def visitor(stack: Stack) -> str:
    """Create a user with some clicks."""
    user_id = new_user_id()
    for item_id in rest_items(stack.recommend(user_id))[:3]:
        stack.sees_click(user_id, item_id)
    return user_id


def of_surface(stack: Stack, user_id: str, surface: str) -> list[str]:
    """Return the REST answer for a surface; None while a gateway does not know the surface."""
    body = {"user_id": user_id, "surface": surface, "deadline_ms": 4_000}
    answer = stack.rest.post("/v1/recommendations", json=body)
    return rest_items(answer.json()) if answer.status_code == 200 else []


def write_draft(page: Page, text: str, surface: str, user_id: str) -> None:
    """Write the whole surfaces text, and choose the surface to preview."""
    page.get_by_label("The surfaces file").fill(text)
    page.get_by_label("Surface", exact=True).fill(surface)
    page.get_by_label("for the user").fill(user_id)


def test_an_item_is_hidden_and_shown_again(page: Page, stack: Stack) -> None:
    """An item found by ID disappears from the page and from REST when hidden, and reappears when shown."""
    item_id = str(page.locator("#items > li").first.get_attribute("data-item"))
    user_id = str(page.locator("#items").get_attribute("data-user"))
    page.get_by_label("An item's id").fill(item_id)
    page.get_by_role("button", name="Find").click()
    row = page.locator(f"#found > li[data-item='{item_id}']")

    row.get_by_role("button", name="Hide").click()
    expect(row.locator(".state")).to_have_text("hidden")
    try:
        expect(page.locator(f"#items > li[data-item='{item_id}']")).to_have_count(0)
        wait_for(lambda: item_id not in rest_items(stack.recommend(user_id, k=200)), 30.0, "an answer without it")
    finally:
        row.get_by_role("button", name="Show").click()
    expect(row.locator(".state")).to_have_text("shown")
    wait_for(lambda: item_id in rest_items(stack.recommend(user_id, k=200)), 30.0, "an answer with it")


def test_a_surface_is_tried_boosted_and_saved(page: Page, stack: Stack) -> None:
    """The preview shows both lists side by side; only saving changes the file, and then every gateway uses it."""
    user_id, path = visitor(stack), stack.settings.surfaces_file
    assert path is not None
    write_draft(page, "# of a test\n[row]\nk = 3\n", "row", user_id)
    page.get_by_role("button", name="Preview").click()
    now, drafted = page.locator("#preview .side").nth(0), page.locator("#preview .side").nth(1)
    expect(drafted.locator("ol > li")).to_have_count(3)
    expect(now.locator("ol > li")).to_have_count(10)

    last = str(now.locator("ol > li").last.get_attribute("data-item"))
    page.get_by_label("An item's id").fill(last)
    page.get_by_role("button", name="Find").click()
    page.get_by_label("Boost, in the draft's surface, by").fill("100")
    page.locator(f"#found > li[data-item='{last}']").get_by_role("button", name="Boost").click()
    expect(drafted.locator("ol > li").first).to_have_attribute("data-item", last)
    expect(drafted.locator("ol > li").first).to_contain_text("boosts: ")
    assert path.read_text() == ""

    try:
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#surfaces-note")).to_contain_text("Saved")
        assert path.read_text() == page.get_by_label("The surfaces file").input_value()
        wait_for(
            lambda: all(of_surface(stack, user_id, "row")[:1] == [last] for _ in range(8)),
            30.0,
            "the surface everywhere",
        )
    finally:
        path.write_text("")


def test_a_form_writes_into_the_draft(page: Page, stack: Stack) -> None:
    """The form edits the text's fields; only the text is saved, with the fields that the form does not support."""
    kept = '{ must_not = [{ key = "categories", eq = "Drama" }] }'
    write_draft(page, f"# of a test\n[row]\nk = 3\n[row.rules]\nblocks = [{kept}]\n", "row", new_user_id())
    page.get_by_label("for the user").press("Tab")
    page.get_by_text("Fields of the surface").click()
    expect(page.get_by_label("Items (k)")).to_have_value("3")

    page.get_by_label("Items (k)").fill("5")
    page.get_by_role("button", name="Add to pins").click()
    page.get_by_label("Pins: item id").fill("50")
    page.get_by_label("Pins: place").fill("2")
    page.get_by_role("button", name="Write into the draft").click()
    expect(page.locator("#surfaces-note")).to_contain_text("The draft has these fields")

    text = page.get_by_label("The surfaces file").input_value()
    row = tomllib.loads(text)["row"]
    assert (text.startswith("# of a test"), kept in text, row["k"]) == (True, True, 5)
    assert row["rules"]["pins"] == [{"item_id": "50", "position": 2}]


def test_a_save_over_another_edit_is_refused(browser: Browser, stack: Stack) -> None:
    """A file that changed since it was read is not overwritten; the draft stays, and a note explains the conflict."""
    path = stack.settings.surfaces_file
    assert path is not None
    context = browser.new_context(viewport=WIDE, base_url=str(stack.rest.base_url))
    page = context.new_page()
    open_console(page)
    try:
        path.write_text("[row]\nk = 4\n")
        write_draft(page, "[row]\nk = 5\n", "row", new_user_id())
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#surfaces-note")).to_contain_text("the file has changed meanwhile; read it again")
        expect(page.get_by_label("The surfaces file")).to_have_value("[row]\nk = 5\n")
        assert path.read_text() == "[row]\nk = 4\n"
        page.get_by_role("button", name="Read again").click()
        expect(page.get_by_label("The surfaces file")).to_have_value("[row]\nk = 4\n")
    finally:
        path.write_text("")
        context.close()


def test_a_user_is_erased_after_a_second_question(page: Page, stack: Stack) -> None:
    """Escape cancels the erasure; the receipt lists each store, and the next answer ignores the user's history."""
    user_id = visitor(stack)
    page.get_by_label("User id", exact=True).fill(user_id)
    page.get_by_role("button", name="Erase…").click()
    expect(page.get_by_role("dialog", name=f"Erase {user_id}?")).to_be_visible()
    page.keyboard.press("Escape")
    assert stack.known(user_id)["newest_event_time_ms"] is not None

    page.get_by_role("button", name="Erase…").click()
    page.get_by_role("dialog").get_by_role("button", name="Erase", exact=True).click()
    expect(page.locator("#receipt-stores > li").first).to_be_visible()
    expect(page.locator("#erase-note")).to_contain_text(re.compile("No answer depends|Every store is done"))

    wait_for(lambda: stack.known(user_id)["newest_event_time_ms"] is None, 60.0, "an answer without a past")
    expect(page.locator("#receipt")).to_contain_text("What remains, and until when")


@pytest.mark.parametrize(("width", "scheme"), LAYOUTS)
def test_the_filled_editor_is_legible_and_fits(browser: Browser, stack: Stack, width: int, scheme: Any) -> None:
    """With found items, a preview and a note, every control has a name, texts have contrast, and nothing overflows."""
    viewport = {"width": width, "height": 900}
    with quiet_page(browser, viewport=viewport, base_url=str(stack.rest.base_url), color_scheme=scheme) as page:
        open_console(page)
        page.get_by_label("An item's id").fill("the")
        page.get_by_role("button", name="Find").click()
        expect(page.locator("#found > li")).to_have_count(20)
        long_line = f"# {'a long line ' * 20}\n[row]\nk = 5\n[row.rules]\ndiversity = 0.5\n"
        write_draft(page, long_line, "row", new_user_id())
        page.get_by_role("button", name="Preview").click()
        expect(page.locator("#preview .side")).to_have_count(2)

        assert page.evaluate(NAMELESS) == []
        assert page.evaluate(FAINT) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(TOO_WIDE) == []
