"""Pictures of the report and of the history page for the docs, from made-up runs.

    python benchmarks/screenshots.py --output docs

Needs Playwright and Chromium (CHROMIUM, else the system's).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
from histories import draw
from playwright.sync_api import sync_playwright
from report_page import write_run

from fly.analysis import history
from fly.analysis.history import Line, OfTask
from fly.analysis.html import write
from fly.runs import reader


def report(folder: Path) -> bytes:
    """Forty documents, and a trace of each."""
    runs = [reader.load(write_run(folder, mode, 40)) for mode in ("target-only", "fly")]
    return write.page(runs)


def series() -> bytes:
    """Sixty nights that lose two documents of a thousand a night."""
    rng, noise = np.random.default_rng(3), random.Random(3)
    scores = draw(rng, "0.2 % a night", 0.0, 200)
    lines = [
        Line(
            date=f"2026-{9 + night // 30:02}-{night % 30 + 1:02}T03-00-00", name="fly", mode="fly",
            target="models/target", draft="models/draft", revision=f"r{night // 7}",
            commit=f"{noise.getrandbits(160):040x}", settings={"spd_k": "6"}, machine={},
            tasks={"gsm8k_cot": OfTask(
                metric="exact_match", higher_is_better=True, documents="made up",
                scores="".join("01"[int(score)] for score in night_scores),
                recovery=night_scores.mean() / scores[0].mean(),
                interval=(night_scores.mean() / scores[0].mean() - 0.04,
                          night_scores.mean() / scores[0].mean() + 0.04),
                tau=3.2 + noise.gauss(0, 0.05), time_x=1.6 + noise.gauss(0, 0.04),
                tok_s=41 + noise.gauss(0, 1), truncated=0.04 + noise.gauss(0, 0.005),
            )},
        )
        for night, night_scores in enumerate(scores)
    ]  # fmt: skip
    return write.history_page(history.group(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        pages = {"report": report(Path(name)), "history": series()}
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for title, content in pages.items():
            file = Path(name) / f"{title}.html"
            file.write_bytes(content)
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-ready]")
            page.wait_for_timeout(300)  # the charts take their widths
            page.screenshot(path=args.output / f"{title}.png")
            if title == "report":
                page.locator("#documents").evaluate("node => node.scrollIntoView()")
                page.wait_for_timeout(1000)  # it scrolls smoothly
                page.screenshot(path=args.output / "report_documents.png")
        browser.close()


if __name__ == "__main__":
    main()
