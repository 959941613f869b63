"""Whether two runs can be compared, and in what: every command asks here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fly.analysis.scores import Measured, Task
from fly.errors import FlyError
from fly.models.fingerprint import WHOLE

Severity = Literal["refuse", "withhold verdict", "withhold times", "note"]
Subject = Literal[
    "questions", "target", "decoding", "engine", "texts", "seconds", "machine", "method"
]
# Where these facts differ, seconds do not compare; where those of METHOD do, a note says so.
_MACHINE = {"device": "device", "capability": "CPU capability", "threads": "threads"}
_METHOD = {
    "engine": "engine", "processes": "processes", "batch_size": "batch size", "dtype": "dtype",
    "passes": "passes of the target", "compile": "compile",
}  # fmt: skip
_OF_FLY = ("sampling", "seed")  # that other backends do not tell
_WHOSE = {True: "of the same model", False: "of another model", None: "it is not known whose"}


@dataclass(frozen=True)
class Reason:
    """One thing that stands between two runs."""

    severity: Severity
    subject: Subject
    why: str  # a clause
    note: str = ""  # a line for people; empty where the comparison has nothing that it bears on


def find_reasons(baseline: Measured, run: Measured) -> list[Reason]:
    """All that stands between two runs; empty if nothing does.

    `refuse`: they did not answer the same questions. `withhold verdict`, `withhold times`: the
    scores are no evidence, the seconds do not compare. `note`: what a reader has to know.
    """
    between, found = f"{run.name} against {baseline.name}", list[Reason]()
    if why := _explain_questions(baseline, run):
        note = f"{baseline.name} and {run.name} cannot be compared: {why}"
        found.append(Reason("refuse", "questions", why, note))
    # why the baseline's scores are not what the run's own target would score
    if why := _explain_target(baseline, run):
        found.append(Reason("note", "target", why, f"{between}: {why}"))
    elif why := _explain_decoding(baseline, run):
        found.append(Reason("note", "decoding", why, f"{between}: {why}"))
    if why := _differences(baseline, run, {"engine": "engine"}):
        found.append(Reason("note", "engine", why, f"{between} compares engines ({why})"))
    return [*found, *_text_reasons(baseline, run), *_time_reasons(baseline, run)]


def explain(baseline: Measured, run: Measured, *subjects: Subject) -> str:
    """In words, what stands between two runs in these subjects; empty if nothing does."""
    return "; ".join(r.why for r in find_reasons(baseline, run) if r.subject in subjects)


def check_comparable(baseline: Measured, run: Measured) -> list[Reason]:
    """`find_reasons`, of which none refuses. Raises FlyError if one does."""
    reasons = find_reasons(baseline, run)
    for reason in reasons:
        if reason.severity == "refuse":
            raise FlyError(reason.note)
    return reasons


def _explain_questions(baseline: Measured, run: Measured) -> str:
    if missing := sorted(baseline.tasks.keys() ^ run.tasks.keys()):
        return f"task {missing[0]} is only in one of them"
    for name, ours in baseline.tasks.items():
        theirs = run.tasks[name]
        for key in ("version", "num_fewshot"):
            if (before := getattr(ours, key)) != (now := getattr(theirs, key)):
                return f"{name} has {key} {before} and {now}"
        if why := _explain_documents(name, ours, theirs):
            return why
    return ""


def _explain_documents(name: str, ours: Task, theirs: Task) -> str:
    if only := sorted(ours.documents.keys() ^ theirs.documents.keys()):
        return (
            f"{name} has {len(ours.documents)} and {len(theirs.documents)} documents; "
            f"document {only[0]} is only in one of them: use the same --limit or --samples"
        )
    for doc_id, document in ours.documents.items():
        found = theirs.documents[doc_id]
        for key, what in (("doc", "content"), ("prompt", "prompt"), ("target", "target")):
            if getattr(document, key) != getattr(found, key):
                return f"{name}, document {doc_id}: the {what} differs"
    return ""


# ------------------------------------------------------------------------------ whose the texts are


def _explain_target(baseline: Measured, run: Measured) -> str:
    ours, theirs = baseline.target, run.target
    if why := _explain_files(ours["files"], theirs["files"]):
        return why
    keys = [] if ours["files"] and theirs["files"] else ["name", "revision"]
    for key in [*keys, "dtype"]:
        known = key != "revision" or None not in (ours[key], theirs[key])
        if ours[key] != theirs[key] and known:
            return f"another target ({key}: {ours[key]}, now {theirs[key]})"
    return ""


def _explain_files(stored: str | None, now: str | None) -> str:
    """Why two fingerprints are not of the same files; empty if they are, or one is not known."""
    if stored is None or now is None or stored == now:
        return ""
    if not stored.startswith(WHOLE):
        return "it was stored by an earlier fly, which knew models by the ends of their files"
    return f"another target (files: {stored}, now {now})"


def _explain_decoding(baseline: Measured, run: Measured) -> str:
    for key, value in run.decoding.items():
        stored = baseline.decoding.get(key)
        if stored != value and not (key in _OF_FLY and None in (stored, value)):
            return _decoded_otherwise(key, stored, value)
    for name, task in run.tasks.items():
        ours = baseline.tasks.get(name, task)
        if ours.generation != task.generation:
            return f"{name} is generated otherwise ({ours.generation}, now {task.generation})"
    return ""


def _text_reasons(baseline: Measured, run: Measured) -> Iterator[Reason]:
    """Under a lossy rule a run that drafts from an earlier run's outputs keeps more of them than
    the model itself would write. Of another model's outputs, or of one that may be another, that
    says nothing of what has changed; of the same model's, a note is enough."""
    for each in (baseline, run):
        if each.leans and each.drafts:
            same = each.drafts.same_target
            who = "" if each is run else f"{each.name} was "
            yield Reason(
                "note" if same else "withhold verdict",
                "texts",
                f"{who}drafted from an earlier run under a lossy rule: its texts lean towards that "
                "run's, so this is no evidence about a changed model",
                f"{each.name} drafted from an earlier run ({_WHOSE[same]}) under a lossy rule: its "
                "texts lean towards that run's",
            )


# --------------------------------------------------------------------------- whose the seconds are


def _time_reasons(baseline: Measured, run: Measured) -> Iterator[Reason]:
    timed = all(any(task.work for task in each.tasks.values()) for each in (baseline, run))
    who = f"{baseline.name} and {run.name}"
    if timed:
        notes = [*_record_notes(baseline, run)]
        if not baseline.machine or not run.machine:  # a stored baseline of an earlier fly
            notes.append(f"time x of {who}: it is not known that they ran on one machine")
        yield from (Reason("note", "seconds", note, note) for note in notes)
    if machine := _differences(baseline, run, _MACHINE):
        note = f"no time x: {who} ran on different machines ({machine})" if timed else ""
        yield Reason("withhold times", "machine", machine, note)
    if method := _differences(baseline, run, _METHOD):
        note = f"time x of {who} is not of decoding alone: they differ in {method}"
        yield Reason("note", "method", method, note if timed and not machine else "")


def _record_notes(baseline: Measured, run: Measured) -> Iterator[str]:
    for each in (baseline, run):
        if each.drafts and each.drafts.from_earlier_runs:
            sources = [key.replace("_", " ") for key in each.drafts.sources]
            yield (
                f"{each.name}: its seconds are with drafts from earlier outputs (drafted from: "
                f"{', '.join(sources)}), not the speed of {each.mode} by itself"
            )
    for name, task in run.tasks.items():
        ours = baseline.tasks.get(name, task).work
        if ours.keys() != task.work.keys():
            yield (
                f"no time x of {name}: {baseline.name} and {run.name} have records of different "
                f"documents of it ({len(ours)} and {len(task.work)} of {len(task.documents)}; the "
                "others may have come from --use_cache)"
            )


def _differences(baseline: Measured, run: Measured, facts: dict[str, str]) -> str:
    """In words, which of these facts both runs tell and differ in; empty if none."""
    ours, theirs = baseline.machine, run.machine
    return "; ".join(
        f"{words}: {ours[key]} and {theirs[key]}"
        for key, words in facts.items()
        if key in ours and key in theirs and ours[key] != theirs[key]
    )


# ------------------------------------------------------------------------------ stored baselines


def check_reusable(path: Path, stored: Measured, run: Measured) -> None:
    """Raise FlyError unless the scores in a baseline file are what the run's target would score."""
    _refuse_reuse(path, explain(stored, run, "target", "decoding"))


def check_reusable_for(
    path: Path, stored: Measured, files: str | None, gen_kwargs: dict[str, Any]
) -> None:
    """The same before a run is made, by what is known then: the target's files, the gen_kwargs."""
    before = stored.decoding.get("gen_kwargs")
    why = _explain_files(stored.target["files"], files)
    if not why and before != gen_kwargs:
        why = _decoded_otherwise("gen_kwargs", before, gen_kwargs)
    _refuse_reuse(path, why)


def _refuse_reuse(path: Path, why: str) -> None:
    if why:
        raise FlyError(
            f"--baseline {path}: cannot be reused: {why}: store a new one with --save-baseline"
        )


def _decoded_otherwise(key: str, before: Any, now: Any) -> str:
    return f"decoded otherwise ({key}: {before}, now {now})"
