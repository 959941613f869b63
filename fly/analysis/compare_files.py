"""A comparison for programs: JSON, and JUnit's XML for the test views of CI systems."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from fly.analysis.compare import Against, Result, Row
from fly.analysis.compare_table import in_words, visible


def as_json(result: Result) -> str:
    """Everything that was computed; docs/compare.md defines the keys."""
    others: list[dict[str, Any]] = []
    for other in result.others:
        found = asdict(other)
        found["verdict"] = other.verdict
        others.append(found)
    entry = {
        "verdict": result.verdict,
        "demand": asdict(result.demand),
        "verdicts": result.verdicts,
        "baseline": {
            "name": result.baseline,
            "speeds": [asdict(s) for s in result.baseline_speeds],
        },
        "others": others,
        "notes": result.notes,
    }
    return json.dumps(entry, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_junit(result: Result, allow_inconclusive: bool) -> str:
    """One suite per run, one test per task and metric; without evidence a test fails, or is
    skipped where that is allowed."""
    root = ElementTree.Element("testsuites", name="fly compare")
    for other in result.others:
        suite = ElementTree.SubElement(root, "testsuite", name=f"{other.name} vs {result.baseline}")
        for row in other.all_rows:
            _test(suite, row, other, result, allow_inconclusive)
        suite.set("tests", str(len(other.all_rows)))
        for kind in ("failure", "skipped"):
            count = len(suite.findall(f"testcase/{kind}"))
            suite.set("failures" if kind == "failure" else kind, str(count))
    for element in root.iter():  # names come from files, too
        element.attrib = {key: visible(value) for key, value in element.attrib.items()}
        element.text = element.text and visible(element.text)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _test(
    suite: ElementTree.Element, row: Row, other: Against, result: Result, allow: bool
) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname=f"{other.name}.{row.task}", name=row.metric, time="0"
    )
    scores = row.scores
    words = "; ".join(in_words(scores, result.demand)) or scores.reason
    recovery = "undefined" if scores.recovery is None else f"{scores.recovery:.4f}"
    numbers = f"{result.baseline} {scores.baseline:.4g}, {other.name} "
    if scores.other is None:
        numbers += "none"
    else:
        numbers += (
            f"{scores.other:.4g}, recovery {recovery}, lost {scores.lost}, won {scores.won} of "
            f"{scores.documents}, p {scores.p:.4g}"
        )
    if scores.verdict in ("held", "unchanged"):
        ElementTree.SubElement(case, "system-out").text = numbers
        return
    skipped = scores.verdict == "not enough evidence" and (allow or not row.is_judged)
    problem = ElementTree.SubElement(
        case, "skipped" if skipped else "failure", message=f"{scores.verdict}: {words}"
    )
    if not skipped:
        problem.set("type", scores.verdict)
    problem.text = numbers
