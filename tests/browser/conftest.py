"""A headless Chromium of the system, driven by Playwright; without either, tests are skipped."""

import os
import shutil

import pytest

from fly.analysis.html import write
from fly.runs import reader

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium: install it (Debian: apt-get install chromium) or set CHROMIUM")
    with sync_api.sync_playwright() as driver:
        # as root, Chromium has no sandbox of its own; the pages are ours
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_report(chromium, tmp_path):
    """Opens the report of some run folders; at the end nothing may be in the console."""
    complaints, contexts = [], []

    def open_(*folders, **options):
        file = tmp_path / "report.html"
        file.write_bytes(write.page([reader.load(folder) for folder in folders]))
        context = chromium.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on(
            "request",
            lambda request: (
                None
                if request.url == file.as_uri() or request.url.startswith("blob:")  # saved files
                else complaints.append(request.url)
            ),
        )
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
