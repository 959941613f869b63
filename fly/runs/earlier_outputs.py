"""Outputs of earlier runs, which a later run drafts from (`draft_runs`).

They are found by task and prompt: its hash says which document it is, while lm-eval numbers
documents anew when a run picks some of them (`--samples`). What another tokenizer wrote is encoded
anew from its text, and used only if nothing is lost by that. docs/drafters.md.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import starmap
from pathlib import Path
from typing import Any

from fly import reading
from fly.errors import FlyError
from fly.models.fingerprint import as_one, hash_json
from fly.paths import expanded
from fly.runs import manifest, output_ids, reader, shapes

_PROMPT_DIGITS = 16  # of lm-eval's hashes of prompts; baseline files hold no more
_RECORDS = "fly_requests_"

# What earlier runs may have for a request.
MATCHES = (
    "matched",  # an output to draft from
    "changed",  # the document, but with another prompt
    "missing",  # not the document
    "untokenized",  # an output that has no ids under this run's tokenizer
)

Ids = tuple[int, ...]
Own = tuple[Path, str]  # the folder of a run and when it started


@dataclass(frozen=True)
class Output:
    """What an earlier run wrote for one request: its text, or token ids, or both."""

    repeat: int
    text: str | None
    ids: Ids | None = None
    tokenizer: str | None = None  # the hash of the ids' tokenizer


@dataclass
class EarlierRun:
    """One earlier run."""

    source: Path  # the file that it was read from, or the folder of its records
    # which model's outputs these are, as `target_of` has it; None if that is not known
    target: str | None = None
    # by (task, document), then by the first digits of the prompt's hash
    outputs: dict[tuple[str, int], dict[str, list[Output]]] = field(
        default_factory=dict, repr=False
    )

    def add(self, task: str, doc_id: int, prompt_hash: str, output: Output) -> None:
        of_document = self.outputs.setdefault((task, doc_id), {})
        of_document.setdefault(prompt_hash[:_PROMPT_DIGITS], []).append(output)

    def digest(self) -> str:
        """The same for equal outputs, wherever they lie and in whatever order they ended."""
        found = hashlib.sha256()
        for document, by_prompt in sorted(self.outputs.items()):
            for prompt, outputs in sorted(by_prompt.items()):
                written = [(o.repeat, o.text, o.ids, o.tokenizer) for o in outputs]
                found.update(repr((document, prompt, sorted(written, key=repr))).encode())
        return found.hexdigest()[:_PROMPT_DIGITS]


@dataclass(frozen=True)
class EarlierOutputs:
    """The outputs of several earlier runs, in the order in which they were named."""

    runs: list[EarlierRun]

    @classmethod
    def read(cls, paths: Iterable[str], own: Own | None = None) -> EarlierOutputs:
        """Each path is a run's folder (its newest finished run, else its newest), a results file or
        a baseline file with outputs. own: the run that asks, which is no earlier run.

        Raises FlyError for a path that names no run, and for damaged files.
        """
        return cls([_read(path, own) for path in paths])

    def digest(self) -> str:
        """Changes with the outputs, not with where they lie."""
        return hash_json([run.digest() for run in self.runs])

    def same_target(self, target: str | None) -> bool | None:
        """Whether all these outputs are of this model (`target_of`); None if it is not known."""
        if target is None:
            return None
        known = [run.target for run in self.runs]
        if any(each not in (None, target) for each in known):
            return False
        return None if None in known else True


class Matcher:
    """Finds the outputs for a request, as ids of `tokenizer`, and counts what it finds."""

    def __init__(self, earlier: EarlierOutputs, tokenizer: Any) -> None:
        self.counts = Counter[str]()  # of requests, by the names in `MATCHES`
        self._earlier = earlier
        self._tokenizer = tokenizer
        self._hash = output_ids.tokenizer_hash(tokenizer)
        vocabulary = tokenizer.get_vocab()
        self._size = 1 + max(vocabulary.values(), default=-1)
        self._longest = max(map(len, vocabulary), default=0)  # characters of a token
        self._found = cache(self._look_up)  # the repeats of a document ask for the same
        self._of_prompt: dict[tuple[str, str], list[Output]] = {}
        for run in earlier.runs:
            for (task, _), by_prompt in run.outputs.items():
                for prompt, outputs in by_prompt.items():
                    self._of_prompt.setdefault((task, prompt), []).extend(outputs)

    def outputs(self, task: str, doc_id: int, prompt_hash: str, budget: int) -> tuple[Ids, ...]:
        """All repeats' outputs, without duplicates. Counts one request.

        budget: of the request, which cannot use more of their tokens.
        """
        match, ids = self._found(task, doc_id, prompt_hash[:_PROMPT_DIGITS], budget)
        self.counts[match] += 1
        return ids

    def _look_up(
        self, task: str, doc_id: int, prompt: str, budget: int
    ) -> tuple[str, tuple[Ids, ...]]:
        """(one of `MATCHES`, the request's outputs)"""
        outputs = self._of_prompt.get((task, prompt), [])
        all_ids = (self._ids(output, budget) for output in outputs)
        found = tuple(dict.fromkeys(ids for ids in all_ids if ids))
        if found:
            return "matched", found
        if outputs:
            return "untokenized", ()
        known = any((task, doc_id) in run.outputs for run in self._earlier.runs)
        return ("changed" if known else "missing"), ()

    def _ids(self, output: Output, budget: int) -> Ids | None:
        """The output's first ids under this tokenizer, at most `budget`; None if they are
        unavailable, or not all in its vocabulary."""
        ids = output.ids if output.tokenizer == self._hash else None
        if ids is None and output.text is not None:
            ids = self._encoded(output.text[: budget * self._longest])
        if ids is None or any(index >= self._size for index in ids[:budget]):
            return None
        return ids[:budget]

    def _encoded(self, text: str) -> Ids | None:
        """None unless decoding gives the text back."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        again = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return tuple(ids) if again == text else None


def target_of(models: Mapping[str, Any]) -> str | None:
    """One fingerprint of a run's target with its adapters, from `environment.models_of`; None if
    it is not known."""
    target = models.get("target") or {}
    found = None
    if files := target.get("files"):
        found = as_one(files)
    elif commit := target.get("commit"):
        found = f"{target['path']}@{commit}"
    adapters = {name: models[name].get("files") for name in ("peft", "delta") if name in models}
    return f"{found}+{hash_json(adapters)}" if found and adapters else found


# ------------------------------------------------------------------------------------ reading


def _read(path: str, own: Own | None) -> EarlierRun:
    given, where = expanded(path), f"draft_runs={path}"
    if given.is_dir():
        found = _newest(given, own)
        if found is None:
            raise FlyError(
                f"{where}: holds no results_*.json and no {_RECORDS}*.jsonl: name a run's folder"
            )
    elif given.is_file():
        value = reading.read_object(given, where)
        if "format" in value and "tasks" in value:
            return _of_baseline(given, value, where)
        found = _Found(given.parent, reader.started_of(given) or "", given)
    else:
        raise FlyError(
            f"{where}: no such run: give a run's folder, its results_*.json or a baseline file"
        )
    records = sorted(found.folder.glob(f"{_RECORDS}{found.started}*.jsonl"))
    if records and found.started:
        return _of_records(found, records)
    assert found.results is not None  # a run without results was found by its records
    return _of_samples(found.results)


@dataclass(frozen=True)
class _Found:
    """A run in a folder."""

    folder: Path
    started: str  # empty for other backends
    results: Path | None = None  # once it has ended

    def is_of(self, own: Own | None) -> bool:
        return own == (self.folder.resolve(), self.started)


def _newest(folder: Path, own: Own | None) -> _Found | None:
    """Of the runs in the folder and in those below it the newest that has ended; without any, the
    one that started last."""
    own = own and (own[0].resolve(), own[1])
    for results in reversed(reader.results_in(folder, below=True)):
        with suppress(FlyError):  # a kill left half of it; the records are whole
            found = _Found(results.parent, reader.started_of(results) or "", results)
            if not found.is_of(own):
                return found
    records = [*folder.glob(f"{_RECORDS}*.jsonl"), *folder.glob(f"*/{_RECORDS}*.jsonl")]
    started = {(p.parent, p.stem.removeprefix(_RECORDS).partition("_rank")[0]) for p in records}
    begun = [found for found in starmap(_Found, started) if not found.is_of(own)]
    return max(begun, key=lambda found: found.started, default=None)


def _of_records(found: _Found, files: Sequence[Path]) -> EarlierRun:
    path = manifest.path_in(found.folder, found.started)
    models = manifest.Manifest.read(path).data.get("models") if path.is_file() else None
    run = EarlierRun(found.results or found.folder, target_of(models or {}))
    for file in files:
        for line in reader.read_lines(file, shapes.OutputLine):
            ids = tokenizer = None
            if output := line.get("output"):
                ids, tokenizer = output_ids.decode(output["ids"]), output["tokenizer"]
            new = Output(line.get("repeat", 0), line["text"], ids, tokenizer)
            run.add(line["task"], line["doc_id"], line["prompt_hash"], new)
    for by_prompt in run.outputs.values():
        for outputs in by_prompt.values():
            outputs.sort(key=lambda output: output.repeat)
    return run


def _of_samples(results: Path) -> EarlierRun:
    """Of a run without records, such as lm-eval's hf: the texts in its samples."""
    run = EarlierRun(results)
    seen = set()
    for task in reader.load(results).tasks.values():
        if task.name not in seen:  # a task's filters have the same responses
            seen.add(task.name)
            for sample in task.samples.values():
                for repeat, text in enumerate(sample.responses):
                    where = f"{results}, document {sample.doc_id}"
                    reading.check_shape({"response": text}, dict[str, shapes.Text], where)
                    run.add(task.name, sample.doc_id, sample.hashes[1], Output(repeat, text))
    return run


def _of_baseline(path: Path, value: dict[str, Any], where: str) -> EarlierRun:
    reading.check_shape(value, shapes.Baseline, f"{where}, a baseline file")
    target = value["target"]
    known = target.get("files")
    if known is None and target.get("revision"):
        known = f"{target.get('name')}@{target['revision']}"
    run = EarlierRun(path, known)
    for name, task in value["tasks"].items():
        outputs = task.get("outputs") or {"tokenizer": "", "ids": {}}
        for doc_id, of_document in outputs["ids"].items():
            document = task["documents"].get(doc_id)
            if document is None or "prompt" not in document or not doc_id.isdecimal():
                raise FlyError(
                    f"{where}: {name}, document {doc_id}: its outputs are of no document: store "
                    "the baseline anew"
                )
            for repeat, text in enumerate(of_document):
                new = Output(repeat, None, output_ids.decode(text), outputs["tokenizer"])
                run.add(name, int(doc_id), document["prompt"], new)
    if not run.outputs:
        raise FlyError(
            f"{where}: the baseline holds no outputs: store it with --save-baseline FILE "
            "--with-outputs"
        )
    return run
