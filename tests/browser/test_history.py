"""The history's page in a browser."""

import pytest

from fly.analysis import history
from fly.analysis.html import write
from tests.unit.test_history import nights

pytestmark = pytest.mark.browser


@pytest.fixture
def open_history(chromium, tmp_path):
    """Opens the page of some lines; at the end nothing may be in the console."""
    complaints = []

    def open_(lines):
        file = tmp_path / "history.html"
        file.write_bytes(write.history_page(history.group(lines)))
        page = chromium.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_
    assert complaints == []


def test_verdict_figures_and_newest_runs(open_history):
    page = open_history(nights(20, 1))
    assert "✗ fell" in page.locator(".card").inner_text()
    assert "it began with document 0" in page.locator(".card").inner_text()
    score = page.get_by_role("img", name="Score: sums acc: target + draft, fly")
    assert score.locator("circle.dot").count() == 20
    assert "began" in score.locator("text.strong").all_text_contents()
    assert page.get_by_role("img", name="Answers cut").count() == 0  # nothing tells
    page.get_by_text("The newest 20 runs").click()
    newest = page.get_by_role("table", name="Newest runs").locator("tbody tr").first
    assert newest.locator("th").inner_text() == "2026-01-20T03-00-00"
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_model_name_stays_text(open_history):
    lines = [each.model_copy(update={"name": "<img src=x onerror=alert(1)>"})
             for each in nights(5, 1)]  # fmt: skip
    page = open_history(lines)
    page.get_by_text("The newest 5 runs").click()
    assert page.locator("img").count() == 0
    assert "onerror" in page.locator("#main").inner_text()
