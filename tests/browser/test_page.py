"""The report in a browser: what a reader clicks, types and sees, and what a model may not do."""

import csv
import json
import re
import time
from xml.etree import ElementTree

import pytest

from tests import configured_runs, traced_runs, written_runs

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script><b id=pwned>x</b>"


@pytest.fixture
def pair(tmp_path):
    """12 documents: the second run loses document 2, wins document 4 and changes three texts."""
    texts = [f"answer {i}" for i in range(12)]
    base = traced_runs.write(
        tmp_path / "base", "target-only", [1, 1, 1, 0, 0, 1] * 2, texts, traced=[0]
    )
    changed = {2: "answer 2 but wrong", 4: "another answer 4", 7: "answer\n\n7"}
    other = traced_runs.write(
        tmp_path / "fly", "fly", [1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1],
        [changed.get(i, text) for i, text in enumerate(texts)], traced=[0, 2], seconds=0.5,
    )  # fmt: skip
    return base, other


def documents(page):
    return [int(text) for text in page.locator("button.open").all_inner_texts()]


def sort_by(page, name):
    return page.locator("th:has(button.sort)", has_text=name).last


def test_headline_and_sections(open_report, pair):
    page = open_report(*pair)
    cards = page.locator(".headline").inner_text()
    assert "fly against target-only" in cards
    assert "100.0\u00a0%" in cards  # one lost, one won
    assert "? not enough evidence" in cards
    assert "Time x, end to end" in cards
    assert "2.00\u00d7" in cards
    assert re.search(r"1 lost, 1 won; \d+ of \d+ texts? differ", cards)
    assert page.locator(".facts").inner_text() == "sums \u00b7 a target \u00b7 2026-01-01"
    for heading in ("Scores", "Speed", "Where the tokens came from", "Documents", "Runs"):
        assert page.get_by_role("heading", name=heading, exact=True).first.is_visible()
    assert page.locator("figure svg[role=img]").count() >= 6


def test_runs_without_scores_are_compared_by_speed_and_texts(open_report, tmp_path):
    how = {"tasks": {"free": {"bypass": [None] * 3}}, "aggregated": {"bypass,none": 999}}
    texts = {"target-only": ["one", "two", "three"], "fly": ["one", "2", "three"]}
    folders = [
        written_runs.write(tmp_path / mode, mode, seconds=seconds, responses=texts[mode], **how)
        for mode, seconds in (("target-only", 2.0), ("fly", 1.0))
    ]
    cards = open_report(*folders).locator(".headline").inner_text()
    assert "its tasks have no score to compare; 1 of 3 texts differ" in cards
    assert "2.00\u00d7" in cards
    assert "Not comparable" not in cards


def test_drafters_by_rules_are_a_shaded_matrix(open_report, tmp_path):
    """The content security policy must let the cells have their shade."""
    scores = {"exact": [1.0] * 20, "fly": [0.0] + [1.0] * 19}
    folders = [written_runs.write(tmp_path / "alone", "target-only", [1.0] * 20)]
    for mode, values in scores.items():
        told = {"entry": {"drafter": "ngram"}, "settings": {"spd_k": 4}, "seconds": 0.5}
        folders.append(written_runs.write(tmp_path / mode, mode, values, **told))
    matrix = open_report(*folders).locator("#matrix")
    head = matrix.locator("table:has(.cell) thead th")
    assert head.all_inner_texts() == ["target, drafter", "exact", "FLy"]
    kept, lost = (matrix.locator(".cell").nth(at) for at in (0, 1))
    assert "1 lost, 0 won; p 1.000" in lost.inner_text()
    assert "time x 2.00\u00d7" in lost.inner_text()
    shades = [
        cell.evaluate("cell => getComputedStyle(cell).backgroundColor") for cell in (kept, lost)
    ]
    assert shades[0] != shades[1]


@pytest.fixture
def many(tmp_path):
    """The target alone and exact runs of two K, at two batch sizes."""
    paths = []
    for size in (1, 4):
        told = {"batch_size": size, "wall_seconds": 2.0 * size}
        paths.append(
            configured_runs.write_run(tmp_path, {"a": [1.0] * 9}, use_sd=False, **told)
        )  # fmt: skip
        for k in (4, 8):
            told["seconds"] = 40 / k / size
            paths.append(
                configured_runs.write_run(
                    tmp_path, {"a": [1.0] * 9}, enable_fly=False, spd_k=k, rounds=100 // k, **told
                )
            )
    return paths


def test_figures_over_many_runs(open_report, many):
    page = open_report(*many)
    frontier = page.get_by_role("img", name="Recovery over time x: a, exact_match")
    assert frontier.locator("circle.dot").count() == 6
    assert frontier.locator("polyline.curve").count() == 1
    legend = page.locator("figure", has=frontier).locator(".legend li").all_inner_texts()
    assert legend[:2] == ["1: target-only (batch size=1)", "2: exact (K=4, batch size=1)"]
    assert sorted(frontier.locator("text.strong").all_text_contents()) == list("123456")
    for name, lines in (("Mean acceptance length (tau) by K: a", 2), ("Time x by K: a", 2),
                        ("Throughput: a", 3)):  # fmt: skip
        drawn = page.get_by_role("img", name=name)
        assert drawn.locator("polyline.join").count() == lines
    sizes = page.get_by_role("img", name="Throughput: a").locator("text.strong").all_text_contents()
    assert sizes == ["4", "1"] * 3  # from the slowest user to the fastest


def test_figures_are_saved_by_keyboard(open_report, many):
    """A saved drawing needs no style sheet; saved numbers are those behind what is shown."""
    page = open_report(*many, viewport={"width": 1200, "height": 900})

    def save(kind, title):
        page.get_by_role("button", name=f"Save {kind}: {title}", exact=True).focus()
        with page.expect_download() as download:
            page.keyboard.press("Enter")
        return download.value

    saved = save("SVG", "Recovery over time x: a, exact_match")
    assert saved.suggested_filename == "recovery-over-time-x-a-exact-match.svg"
    drawing = ElementTree.parse(saved.path()).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert drawing.tag == f"{svg}svg"
    assert drawing.find(f"{svg}rect").get("fill") == "rgb(255, 255, 255)"
    assert {text.get("font-size") for text in drawing.iter(f"{svg}text")} == {"12px"}
    dots = [dot.get("fill") for dot in drawing.iter(f"{svg}circle") if dot.get("r") == "5"]
    assert len(set(dots)) == 6
    bars = ElementTree.parse(save("SVG", "Where the time went").path()).getroot()
    assert {pattern.get("id") for pattern in bars.iter(f"{svg}pattern")} == {"hatch", "dots"}
    assert any("#hatch" in rect.get("fill") for rect in bars.iter(f"{svg}rect"))

    def rows(title):
        with open(save("CSV", title).path(), newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    by_k = rows("Mean acceptance length (tau) by K: a")
    taus = [float(row["Mean acceptance length (tau)"]) for row in by_k]
    assert taus == pytest.approx([4, 100 / 12] * 2, abs=1e-4)
    speeds = rows("Time x")
    assert float(speeds[1]["time x, end to end"]) == pytest.approx(1)
    assert float(speeds[1]["end to end, 95 % low"]) <= 1
    assert rows("Did the scores hold?")[0]["verdict"] == "unchanged"
    page.get_by_role("button", name="Dark theme").click()
    dark = ElementTree.parse(save("SVG", "Where the time went").path()).getroot()
    assert dark.find(f"{svg}rect").get("fill") != "rgb(255, 255, 255)"


def test_every_figure_can_be_saved(open_report, pair):
    page = open_report(*pair)
    for figure in page.locator("figure").all():
        if figure.locator("table").count():
            assert figure.get_by_role("button", name="Save CSV").count() == 1
        drawn = figure.locator(".chart").count()
        assert figure.get_by_role("button", name="Save SVG").count() == drawn


def test_notes_and_reasons_are_those_of_the_comparison(open_report, tmp_path):
    """Notes were drawn in the card of time x alone, where there is one; p was 0.000."""
    scores = {"acc": [1.0] * 40}
    base = written_runs.write(tmp_path / "a", "target-only", tasks={"t": scores})
    more = {"acc": [0.0] * 40, "f": [1.0] * 40}
    fell = written_runs.write(tmp_path / "b", "fly", tasks={"t": more}, machine={"batch_size": 2})
    page = open_report(base, fell)
    assert "time x of target-only and fly is not of decoding alone" in (
        page.locator(".headline").inner_text()
    )
    scored = page.locator("#scores").inner_text()
    assert "Note: fly: t f: target-only has no such metric; left out" in scored
    assert "<0.001 (McNemar)" in scored
    same = written_runs.write(tmp_path / "c", "exact", tasks={"t": scores})
    cards = open_report(base, same).locator(".headline").inner_text()
    assert "= unchanged" in cards
    assert "this rules out a loss above 7.2% of the score" in cards


def test_the_tokens_shown_first_are_of_a_run_that_drafted(open_report, tmp_path):
    alone = [
        {**traced_runs.ROUNDS[-1], "start": 0, "draft": [], "by": "", "native": "", "length": 1}
    ]
    alone[0] |= {"choice": [1], "entropy": [0.1]}
    base = traced_runs.write(tmp_path / "base", "target-only", traced=[0], rounds=alone)
    page = open_report(base, traced_runs.write(tmp_path / "fly", traced=[0]))
    box = page.locator("#traces").get_by_label("Run")
    assert box.evaluate("box => box.selectedOptions[0].text") == "fly"


def test_times_of_different_machines_are_not_shown(open_report, pair):
    for folder, name in zip(pair, ("a CPU", "another CPU")):
        (path,) = folder.glob("results_*.json")
        results = json.loads(path.read_text())
        device = {"type": "cpu", "name": name, "capability": "AVX2", "threads": 2}
        results["config"]["fly"]["device"] = device
        path.write_text(json.dumps(results))
    page = open_report(*pair)
    cards = page.locator(".headline").inner_text()
    assert "Withheld: device: a CPU and another CPU" in cards
    assert "2.00\u00d7" not in cards
    assert page.get_by_text("times do not compare").first.is_visible()


def test_sorting(open_report, pair):
    page = open_report(*pair)
    assert documents(page) == [2, 4, 7, 0, 1, 3, 5, 6, 8, 9, 10, 11]  # lost, won, another text
    head = sort_by(page, "tokens")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert documents(page) == list(reversed(range(12)))
    change = sort_by(page, "change")
    change.get_by_role("button").click()
    assert documents(page)[0] == 2  # lost comes first
    assert head.get_attribute("aria-sort") == "none"


def test_filters(open_report, pair):
    page = open_report(*pair)
    for kind, found in {"changed scores": [2, 4], "lost": [2], "won": [4]}.items():
        page.get_by_label("Show").select_option(kind)
        assert documents(page) == found
    page.get_by_label("Show").select_option("changed scores")
    assert page.get_by_role("status").inner_text() == "2 of 12 documents"
    page.get_by_label("Show").select_option("different texts")
    assert documents(page) == [2, 4, 7]
    page.get_by_label("Search").fill("ANOTHER")
    page.locator("button.open").nth(1).wait_for(state="detached")
    assert documents(page) == [4]
    page.get_by_label("Search").fill("in no document")
    page.get_by_text("No document fits these filters.").wait_for()


def test_side_by_side(open_report, pair):
    page = open_report(*pair)
    page.get_by_role("button", name="Open document 2 of sums").click()
    dialog = page.get_by_role("dialog")
    left, right = dialog.locator(".pane pre").all_inner_texts()
    assert (left, right) == ("answer 2", "answer 2 but wrong")
    assert dialog.locator("del").count() == 0
    assert dialog.locator("ins").all_inner_texts() == [" but wrong"]
    for _ in range(2):
        dialog.get_by_role("button", name="Next").click()
    assert dialog.locator("ins").all_inner_texts() == ["↵\n↵\n"]  # white space that differs is seen
    dialog.get_by_role("button", name="Next").click()
    assert "The two texts are the same." in dialog.inner_text()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()


def test_a_link_opens_a_document_and_keys_go_on_from_it(open_report, pair):
    """The address names task and number, so that it holds in tomorrow's page as well."""
    page = open_report(*pair)
    page.goto(f"{page.url}#document/sums/7")
    title = page.locator("#document-title")
    assert title.inner_text() == "sums, document 7"
    for key, number in (("j", 0), ("k", 7), ("k", 4)):
        page.keyboard.press(key)
        assert title.inner_text() == f"sums, document {number}"
        assert page.evaluate("location.hash") == f"#document/sums/{number}"
    link = page.get_by_role("dialog").get_by_role("link", name="Link")
    assert link.get_attribute("href") == "#document/sums/4"
    page.keyboard.press("Escape")
    page.wait_for_url("**/*#documents")  # a dialog tells later that it closed
    page.reload()
    assert not page.get_by_role("dialog").is_visible()


def test_filters_by_category_length_and_parting(open_report, tmp_path):
    texts = ["a" * (10 * i) for i in range(12)]
    folders = [
        traced_runs.write(
            tmp_path / mode, mode, [1] * 12,
            [f"{text}{'!' * (mode == 'fly' and i < 8)}" for i, text in enumerate(texts)],
        )
        for mode in ("target-only", "fly")
    ]  # fmt: skip
    for folder in folders:
        (path,) = folder.glob("samples_*")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["doc"] |= {"level": ["easy", "hard"][line["doc_id"] % 2]}
        written_runs.write_lines(path, lines)
    page = open_report(*folders)
    page.get_by_label("level").select_option("hard")
    assert documents(page) == [1, 3, 5, 7, 9, 11]
    page.get_by_label("Length, characters").select_option("81 to 110")
    assert documents(page) == [9, 11]
    page.get_by_label("Length, characters").select_option("any")
    page.get_by_label("Texts part at character").select_option("up to 10")
    assert documents(page) == [1]
    assert page.get_by_label("question").count() == 0  # every document has its own


def test_reasoning_is_folded(open_report, tmp_path):
    texts = {"target-only": "<think>so</think>\n\n4", "fly": "<think>thus</think>\n\n5"}
    page = open_report(*(
        traced_runs.write(tmp_path / mode, mode, [1], [text]) for mode, text in texts.items()
    ))  # fmt: skip
    page.get_by_role("button", name="Open document 0 of sums").click()
    panes = page.get_by_role("dialog").locator(".pane pre")
    assert [pane.inner_text() for pane in panes.all() if pane.is_visible()] == ["4", "5"]
    page.get_by_text("Reasoning", exact=True).click()
    assert "<think>thus</think>" in panes.all_inner_texts()


def test_on_paper(open_report, pair):
    """A printed page is light, and has nothing to click."""
    page = open_report(*pair, color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".controls, .save, .pager").first.is_visible()
    assert page.locator(".headline").first.is_visible()
    page.evaluate("openDocument(0, [0])")
    assert not page.locator(".headline").first.is_visible()


@pytest.mark.parametrize(
    ("left", "right"),
    [("a b c d", "a x c d e"), ("", "new"), ("gone", ""), ("a a a b", "b a a a"), ("é 中", "中 é"),
     ("one two " * 400, "two one " * 400), ("x y", "x y")],
)  # fmt: skip
def test_differences_rebuild_both_texts(open_report, tmp_path, left, right):
    """Common words are the same on both sides, and each side's words join to its text."""
    page = open_report(traced_runs.write(tmp_path / "a", "fly", (1,)))
    a, b = page.evaluate("([left, right]) => difference(left, right)", [left, right])
    assert "".join(text for text, _ in a) == left
    assert "".join(text for text, _ in b) == right
    common = ["".join(text for text, same in side if same) for side in (a, b)]
    assert common[0] == common[1]
    assert (left == right) == all(same for side in (a, b) for _, same in side)


def test_differences_are_shortest(open_report, tmp_path):
    """Myers' algorithm against longest common subsequences from the textbook's table."""
    page = open_report(traced_runs.write(tmp_path / "a", "fly", (1,)))
    for left, right in [("a b c a b b a", "c b a b a c"), ("x a y b z", "a b"), ("q w", "e r t")]:
        words = [page.evaluate("words", text) for text in (left, right)]
        a, b = page.evaluate("([left, right]) => edits(left, right)", words)
        assert len(words[0]) - len(a) == len(words[1]) - len(b) == longest_common(*words)


def longest_common(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def test_trace_on_hover(open_report, pair):
    page = open_report(*pair)
    tokens = page.locator("#traces .tokens")
    page.locator("#traces").get_by_label("Run").select_option("fly")
    assert "alpha beta gamma delta epsilon↵\n" in tokens.inner_text()
    deferred = tokens.locator(".token.deferred")
    deferred.hover()
    tip = page.locator("#traces .tip")
    shown = tip.inner_text()
    for part in ("deferred, stood", "0.900 nats", "<b␣id=pwned>bold</b>", "the draft model"):
        assert part in shown
    assert "opened here; the next 2 matched" in shown
    assert tokens.locator(".in-window").count() == 3
    tokens.locator(".token.recovered").last.hover()
    assert "␣gamma" in tip.inner_text()  # what it stands for
    page.mouse.move(0, 0)
    assert not tip.is_visible()
    rolled = tokens.locator(".token.rolled")
    assert rolled.count() == 2
    page.locator("#traces").get_by_label("rolled-back tokens").uncheck()
    assert not rolled.first.is_visible()


STYLES = """nodes => nodes.map((node) => {
  const style = getComputedStyle(node);
  return `${style.textDecorationLine} ${style.textDecorationStyle}`;
})"""


def test_sources_differ_without_colour(open_report, pair):
    """Every source has an underline of its own: a reader may not see colours."""
    page = open_report(*pair)
    styles = page.locator("#traces .legend .token").evaluate_all(STYLES)
    assert len(styles) == len(set(styles)) == 6


def test_acceptance_of_a_run_without_a_trace(open_report, tmp_path):
    lengths = {"tau": 2.5, "tau_document_mean": 2.25, "al": 3.125, "al_document_mean": 3.5}
    positions = {"drafted": [8, 8, 4], "reached": [8, 6, 2], "accepted": [6, 4]}
    stats = {**lengths, "positions": positions, "tasks": {"sums": {"documents": 2, **lengths}}}
    page = open_report(traced_runs.write(tmp_path / "fly", stats=stats))
    assert "AL = 1 + accepted / drafts = 3.13; means over documents: tau 2.25, AL 3.50" in (
        page.locator(".headline").inner_text()
    )
    speed = page.get_by_role("table", name="Mean acceptance lengths").inner_text()
    assert speed.split("\n")[-1].split("\t") == ["fly", "sums", "2", "2.50", "2.25", "3.13", "3.50"]
    page.locator("#drafts summary").first.click()
    rows = page.get_by_role("table", name="Acceptance by draft position").inner_text().split("\n")
    assert [row.split("\t")[-2:] for row in rows[-3:]] == [
        ["75.0\u00a0%", "75.0\u00a0%"],
        ["50.0\u00a0%", "66.7\u00a0%"],
        ["0.0\u00a0%", "0.0\u00a0%"],
    ]
    assert "Without a trace" in page.locator("#drafts").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_drafts_from_texts(open_report, tmp_path, scheme):
    """Every source that occurs has a name, an underline and a readable colour, and its counts."""
    counts = {"earlier_run": {"drafted": 1310, "accepted": 1204}}
    folder = traced_runs.write(
        tmp_path / "a", traced=[0], rounds=traced_runs.FROM_TEXTS, sources=counts
    )
    page = open_report(folder, color_scheme=scheme)
    names = page.locator("#traces .legend li").all_inner_texts()
    assert {"earlier run 1", "sibling 1", "other document 1", "draft 2"} <= set(names)
    styles = page.locator("#traces .legend .token").evaluate_all(STYLES)
    assert len(styles) == len(set(styles)) == 9
    page.locator("#traces .tokens .token.sibling").hover()
    assert "another sample of this prompt" in page.locator("#traces .tip").inner_text()
    assert [entry for entry in page.evaluate(CONTRAST) if entry[0] < 4.5] == []
    row = page.locator("#runs tr", has_text="drafted from earlier run")
    assert "1\u202f204 of 1\u202f310 accepted (91.9\u00a0%)" in row.inner_text()


def test_by_keyboard(open_report, pair):
    page = open_report(*pair)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.locator("#traces .tokens [tabindex='0']").count() == 1  # one stop, arrows inside
    page.locator("#traces .tokens [tabindex='0']").focus()
    tip = page.locator("#traces .tip")
    assert "token 1, round 1" in tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert "token 2, round 1" in tip.inner_text()
    page.keyboard.press("End")
    assert "round 3" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    sort_by(page, "tau").get_by_role("button").focus()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    assert sort_by(page, "tau").get_attribute("aria-sort") == "ascending"
    opener = page.get_by_role("button", name="Open document 0 of sums")
    opener.focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.ariaLabel") == "Open document 0 of sums"
    page.keyboard.press("/")
    page.keyboard.type("another j")  # letters that are keys elsewhere
    assert page.get_by_label("Search").input_value() == "another j"


CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const found = [];
  for (const node of document.querySelectorAll("main :not(title), header *, dialog :not(title)")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || node.closest("button:disabled")) continue;
    const style = getComputedStyle(node);
    const ink = node.closest("svg") ? style.fill : style.color;
    if (node.classList.contains("on")) continue;  // on bars, checked below
    const [a, b] = [light(parse(ink)), light(ground(node))];
    found.push([ratio(a, b), node.getAttribute("class") + ": " + node.textContent.slice(0, 30)]);
  }
  for (const node of document.querySelectorAll("text.on")) {
    for (const bar of node.parentElement.querySelectorAll(".ink")) {
      const [ink, ground] = [node, bar].map((each) => getComputedStyle(each).fill);
      found.push([ratio(light(parse(ink)), light(parse(ground))), "on a bar " + ground]);
    }
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(open_report, pair, scheme):
    """WCAG AA: 4.5 to 1 for every text there is, in both themes."""
    page = open_report(*pair, color_scheme=scheme)
    page.get_by_role("button", name="Open document 4 of sums").click()
    found = page.evaluate(CONTRAST)
    assert len(found) > 100
    assert [entry for entry in found if entry[0] < 4.5] == []


def test_dark_theme_and_toggle(open_report, pair):
    page = open_report(*pair, color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    assert sum(map(int, dark[4:-1].split(","))) < 150
    page.get_by_role("button", name="Light theme").click()
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="light")
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate(paper) == dark


def test_on_a_phone(open_report, pair):
    """No sideways scrolling of the page: tables scroll in themselves, charts fit."""
    page = open_report(*pair, viewport={"width": 380, "height": 780}, has_touch=True)
    wide = "[document.documentElement.scrollWidth, document.querySelector('dialog').scrollWidth]"
    page.wait_for_timeout(200)
    assert page.evaluate(wide)[0] <= 380
    table = page.locator("#documents .scroll")
    assert table.evaluate("node => node.scrollWidth > node.clientWidth")
    page.locator("#traces").get_by_label("Run").select_option("fly")
    page.locator("#traces .tokens .token.deferred").tap()
    box = page.locator("#traces .tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 380
    page.get_by_role("button", name="Open document 2 of sums").tap()
    assert page.evaluate(wide)[1] <= 380


def test_model_output_does_nothing(open_report, tmp_path):
    """`<script>` and handlers in texts, answers, prompts and tokens stay text everywhere."""
    runs = [
        traced_runs.write(tmp_path / name, name, (1, 0), [EVIL, f"{name} {EVIL}"], traced=[0],
                          prompt=EVIL)
        for name in ("target-only", "fly")
    ]  # fmt: skip
    page = open_report(*runs)
    page.get_by_label("Search").fill("onerror")
    page.get_by_role("button", name="Open document 1 of sums").click()
    page.get_by_text("Prompt and target").click()
    dialog = page.get_by_role("dialog")
    assert EVIL in dialog.inner_text()
    dialog.get_by_role("button", name="Next").click()
    for token in dialog.locator(".token").all()[:12]:
        token.hover(force=True)
    assert page.locator("#pwned, img").count() == 0
    assert page.locator("script").count() == 5


def test_one_run_without_a_trace(open_report, tmp_path):
    page = open_report(traced_runs.write(tmp_path / "a", "fly", (1, 0)))
    assert "0.500" in page.locator(".headline").inner_text()
    assert "trace=true" in page.locator("#traces").inner_text()
    assert "trace=true" in page.locator("#drafts").inner_text()
    assert page.get_by_label("Show").count() == 0


def test_lm_evals_own_backend_among_three(open_report, tmp_path):
    names = ("target-only", "fly", "hf")
    page = open_report(*(traced_runs.write(tmp_path / name, name) for name in names))
    assert page.locator(".headline").count() == 2
    page.get_by_role("button", name="Open document 0 of sums").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Left").select_option("hf")
    assert dialog.locator(".pane h4").first.inner_text() == "hf"


def test_thousands_of_documents_open_at_once(open_report, tmp_path):
    """2,000 documents of two runs, with long prompts and texts: open within 3 seconds."""
    count = 2000
    text = "A long answer with some words in it. " * 30
    folders = [
        traced_runs.write(
            tmp_path / name, name, [i % 3 == 0 for i in range(count)],
            [f"{name} {i} {text}" for i in range(count)], prompt=text * 3, traced=range(200),
        )
        for name in ("target-only", "fly")
    ]  # fmt: skip
    page = open_report(*folders)
    start = time.perf_counter()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator("button.open").count() == 50
    assert time.perf_counter() - start < 3
    assert page.get_by_role("status").inner_text() == "2\u202f000 documents"
    page.get_by_role("button", name="Next →").click()
    assert documents(page)[0] == 50
    page.get_by_label("Search").fill("fly 1777 ")
    page.locator("button.open").nth(1).wait_for(state="detached")
    assert documents(page) == [1777]
