"""A comparison for programs: JSON, and JUnit's XML for the test views of CI systems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from fly.analysis.compare import Against, Result
from fly.analysis.statistics import Verdict
from fly.analysis.tables import in_words, ratio_text, score_texts, visible


def as_json(result: Result, categories: Sequence[dict[str, Any]] = ()) -> str:
    """Everything that was computed; docs/compare.md defines the keys."""
    entry = {
        "verdict": result.verdict,
        "demand": asdict(result.demand),
        "verdicts": result.verdicts,
        "baseline": {
            "name": result.baseline,
            "speeds": [asdict(speed) for speed in result.baseline_speeds],
        },
        "others": [against_as_dict(other) for other in result.others],
        "noise_floor": [asdict(row) for row in result.noise],
        "categories": [*categories],
        "notes": result.notes,
    }
    return json.dumps(entry, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def against_as_dict(other: Against) -> dict[str, Any]:
    """One run's rows and speeds, for `--json` and for the page."""
    rows = [{**asdict(row), "verdict": row.verdict} for row in other.all_rows]
    overall = rows.pop() if other.overall else None
    return {**asdict(other), "rows": rows, "overall": overall, "verdict": other.verdict}


def as_junit(result: Result, allow_inconclusive: bool) -> str:
    """One suite per run, one test per task and metric; without evidence a test fails, or is
    skipped where that is allowed. So some test fails exactly where the exit status does."""
    root = ElementTree.Element("testsuites", name="fly compare")
    for other in result.others:
        suite = ElementTree.SubElement(root, "testsuite", name=f"{other.name} vs {result.baseline}")
        is_any_judged = any(not row.scores.decides_nothing for row in other.all_rows)
        for row in other.all_rows:
            scores, texts = row.scores, score_texts(row.scores)
            numbers = (
                f"{result.baseline} {scores.baseline:.4g}, {other.name} {texts.score}, "
                f"recovery {texts.recovery}, lost / won {texts.changed} of "
                f"{scores.documents}, p {texts.p}"
            )
            why = "; ".join(in_words(scores, result.demand)) or scores.reason
            allow = allow_inconclusive or (scores.decides_nothing and is_any_judged)
            place = f"{other.name}.{row.task}"
            _add(suite, place, row.metric, scores.verdict, numbers, why, allow)
        for gate in other.gates:
            place, value = f"{other.name}.{gate.gate.task or 'overall'}", ratio_text(gate.value)
            why = gate.reason or value
            _add(suite, place, gate.gate.label, gate.verdict, value, why, allow_inconclusive)
        if not len(suite):
            why = "its tasks have no score to compare"
            _add(suite, other.name, "score", other.verdict, "", why, allow_inconclusive)
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    for element in root.iter():  # names come from files, too
        element.attrib = {key: visible(value) for key, value in element.attrib.items()}
        element.text = element.text and visible(element.text)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"


def _add(
    suite: ElementTree.Element,
    place: str,
    name: str,
    verdict: Verdict,
    numbers: str,
    why: str,
    allow: bool,
) -> None:
    """One test. allow: whether it is skipped without enough evidence."""
    case = ElementTree.SubElement(suite, "testcase", classname=place, name=name, time="0")
    message = {"message": f"{verdict}: {why}"}
    if verdict in ("held", "unchanged"):
        found = ElementTree.SubElement(case, "system-out")
    elif allow and verdict == "not enough evidence":
        found = ElementTree.SubElement(case, "skipped", message)
    else:
        found = ElementTree.SubElement(case, "failure", {**message, "type": verdict})
    found.text = numbers
