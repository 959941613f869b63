"""What a comparison needs of a run: scores and work per document. Also kept as a baseline file.

A baseline file is one JSON, small enough to commit: hashes instead of texts.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from fly import reading, registry
from fly.errors import FlyError
from fly.models import sources
from fly.models.fingerprint import as_one, hash_model
from fly.paths import write_output
from fly.runs.reader import Run, TaskRun
from fly.runs.records import DECODING, TIMED, Lengths, Positions
from fly.runs.shapes import RequestLine

LARGEST = 1e50  # a score beyond it is no number: statistics take fourth powers
_BY_DOCUMENT = ("documents", "work", "texts", "clusters", "groups")  # of a task
_Value = TypeVar("_Value")
_LONG = 100  # characters of a text that documents share by no chance


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DocumentHashes(_Stored):
    """The first digits of lm-eval's hashes of the document, its prompt and its target."""

    doc: str
    prompt: str
    target: str

    @classmethod
    def of(cls, doc: str, prompt: str, target: str) -> DocumentHashes:
        return cls(doc=doc[:16], prompt=prompt[:16], target=target[:16])


class Work(_Stored):
    """Of one document, all its requests (repeats) together."""

    tokens: int
    rounds: int
    decode: float  # seconds, without prefill
    end_to_end: float  # seconds, with prefill
    accepted: int = 0  # draft tokens that stand; 0 where that is unknown
    drafts: int = 0  # rounds with a draft; 0 where that is unknown

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.tokens, self.rounds, self.accepted, self.drafts)


class Metric(_Stored):
    """One metric under one filter."""

    name: str
    filter: str
    higher_is_better: bool
    # by document id, of those that it is of
    scores: dict[int, Annotated[float, Field(ge=-LARGEST, le=LARGEST)]]
    left_out: str = ""  # why it cannot be compared; empty if it can

    @property
    def label(self) -> str:
        return self.name if self.filter == "none" else f"{self.name},{self.filter}"

    @property
    def names(self) -> set[str]:
        """What it may be asked for by; lm-eval's own names have the filter, `acc,none`, too."""
        return {self.name, self.label, f"{self.name},{self.filter}"}

    @property
    def has_row(self) -> bool:
        """Whether it belongs into a comparison: also where only some documents have a number, which
        is not enough evidence, but no reason to look away."""
        return bool(self.scores) and self.left_out != _NO_MEAN


_NO_MEAN = "is no mean over documents"


class Outputs(_Stored):
    """Token ids of a task's outputs (fly.runs.output_ids), for later runs to draft from."""

    tokenizer: str  # the hash of theirs
    ids: dict[int, list[str]]  # by document id, one per repeat


class Task(_Stored):
    """One task. Stored runs have no texts, clusters and shared."""

    version: str
    num_fewshot: int
    generation: dict[str, Any]  # its generation_kwargs
    documents: dict[int, DocumentHashes]  # by document id
    metrics: list[Metric]
    work: dict[int, Work]  # by document id; empty for other backends than fly's
    # of all documents; empty where that is unknown
    positions: Positions = Field(default_factory=Positions)
    outputs: Outputs | None = None  # only where they were asked for
    # the responses, by document id; empty for tasks that write none
    texts: dict[int, tuple[str, ...]] = Field(default_factory=dict, exclude=True)
    # by document id; only where they were asked for
    clusters: dict[int, str] = Field(default_factory=dict, exclude=True)
    groups: dict[int, str] = Field(default_factory=dict, exclude=True)
    # the first field of long texts that several documents have in common; empty without one
    shared: str = Field(default="", exclude=True)

    def metric(self, label: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.label == label), None)

    def select(self, numbers: Mapping[int, int]) -> Task:
        """These documents alone, under new numbers: by the old ones."""

        def move(values: Mapping[int, _Value]) -> dict[int, _Value]:
            return {numbers[i]: value for i, value in values.items() if i in numbers}

        changed: dict[str, Any] = {name: move(getattr(self, name)) for name in _BY_DOCUMENT}
        changed["metrics"] = [
            metric.model_copy(update={"scores": dict(sorted(move(metric.scores).items()))})
            for metric in self.metrics
        ]
        if len(numbers) < len(self.documents):
            changed["positions"] = Positions()  # not told by document
        return self.model_copy(update=changed)


class Drafts(_Stored):
    """Where a run's drafts came from."""

    sources: list[str]  # by the keys in fly.runs.records.SOURCES
    from_earlier_runs: bool  # outputs of earlier runs were drafted from
    # whether these outputs are of the run's own target; None if that is not known
    same_target: bool | None


_OfTarget = Annotated[str, StringConstraints(pattern="^(name|dtype|revision|files)$")]


class Measured(_Stored):
    """A run's scores."""

    format: Literal[1] = 1
    name: str
    mode: str
    # the model that they belong to
    target: Annotated[dict[_OfTarget, str | None], Field(min_length=4)]
    decoding: dict[str, Any]  # what its texts depend on
    machine: dict[str, Any] = {}  # what its seconds depend on besides
    tasks: dict[str, Task]
    notes: list[str] = []  # what was left out, for people
    drafts: Drafts | None = None  # None where nothing was drafted, or it is not known from where
    # of the settings that its texts depend on, the rule's among them; None for other backends' runs
    # and stored ones
    config_hash: str | None = Field(default=None, exclude=True)
    # draft tokens; None for other backends' runs and stored ones
    drafted: int | None = Field(default=None, exclude=True)
    # tokens per second of a request of its own, queueing and prompt included; None but for servers
    tok_s_per_user: float | None = Field(default=None, exclude=True)
    spd_k: int | None = Field(default=None, exclude=True)  # None where nothing is drafted

    @property
    def is_from_earlier_runs(self) -> bool:
        """Whether its speed is with drafts from earlier runs' outputs."""
        return self.drafts is not None and self.drafts.from_earlier_runs

    @property
    def leans(self) -> bool:
        """Whether its texts lean towards those of the earlier runs that it drafted from: lossy
        rules let tokens in because they were drafted."""
        rule = registry.RULES.get(self.mode)
        is_lossless = self.mode == "target-only" or (rule is not None and rule.is_lossless)
        return self.is_from_earlier_runs and not is_lossless

    @property
    def has_outputs(self) -> bool:
        return any(task.outputs is not None for task in self.tasks.values())


_GENERATES = "generate_until"  # lm-eval's output_type of tasks whose responses are texts


def measure(
    run: Run, *, with_outputs: bool = False, cluster: str | None = None, by: str | None = None
) -> Measured:
    """Reduce a finished run. with_outputs: with the token ids that its records hold. cluster, by:
    the documents' fields by which they form clusters, and groups.

    Raises FlyError if it scored nothing, and if a document lacks the field.
    """
    notes = [f"{run.name}: {told}" for told in (_acceptance(run), *_unfinished(run)) if told]
    parts_of: dict[str, list[TaskRun]] = defaultdict(list)
    for task in run.tasks.values():
        parts_of[task.name].append(task)
    if not parts_of:
        raise FlyError(f"{run.path}: holds no samples: nothing was scored")
    requests, entry = _requests(run), run.entry or {}
    outputs = _outputs(run) if with_outputs else {}
    tasks = {}
    for name, parts in parts_of.items():
        first, task_config = parts[0], run.results["configs"].get(name, {})
        writes = task_config.get("output_type", _GENERATES) == _GENERATES
        tasks[name] = Task(
            version=first.version,
            num_fewshot=first.num_fewshot,
            generation=task_config.get("generation_kwargs") or {},
            documents={i: DocumentHashes.of(*s.hashes) for i, s in first.samples.items()},
            metrics=[metric for part in parts for metric in _metrics(part, run.name, notes)],
            work={doc_id: _sum(records) for doc_id, records in requests[name].items()},
            positions=_positions(chain.from_iterable(requests[name].values())),
            outputs=outputs.get(name),
            texts={i: sample.responses for i, sample in first.samples.items()} if writes else {},
            clusters=_values(name, first, cluster, "--cluster") if cluster else {},
            groups=_values(name, first, by, "--by") if by else {},
            shared=_find_shared_field(first),
        )
    return Measured(
        name=run.name,
        mode=run.mode,
        target=_target(run),
        decoding=_decoding(run),
        machine=_machine(run),
        tasks=tasks,
        notes=notes,
        drafts=_drafts(run),
        config_hash=entry.get("config_hash"),
        drafted=(entry.get("stats") or {}).get("drafted"),
        tok_s_per_user=_tok_s_per_user(run),
        spd_k=entry["config"].get("spd_k") if entry.get("drafter") else None,
    )


def _acceptance(run: Run) -> str:
    """Of a server's run, in words, as far as the server told it; empty for other runs."""
    if not (run.entry and run.entry.get("server")):
        return ""
    stats = run.entry["stats"]
    if not (drafted := stats["drafted"]):
        return "drafts nothing, or the server does not tell"
    accepted = stats["native_accepted"]
    untold = [label for key, label in (("tau", "tau"), ("al", "AL")) if stats[key] is None]
    more = f"; {' and '.join(untold)}: not told by the server" if untold else ""
    share = f"{accepted / drafted:.3f}"
    return f"the server accepted {accepted:,} of {drafted:,} draft tokens ({share}){more}"


def _unfinished(run: Run) -> Iterator[str]:
    """How many answers the budget ended, and how many ended within a thought, in words; no
    line for a count of 0. A rule that makes answers longer loses scores by that alone."""
    cut = sum(record.get("finish_reason") == "length" for record in run.requests)
    unclosed = sum(record.get("unclosed_thinking", False) for record in run.requests)
    for count, said in (
        (cut, "ended at the length limit, where a score says little of the rest"),
        (unclosed, "never closed their thoughts"),
    ):
        if count:
            share = count / len(run.requests)
            yield f"{count:,} of {len(run.requests):,} answers ({share:.0%}) {said}"


def _tok_s_per_user(run: Run) -> float | None:
    own = [(r["emitted"], r["server"]["seconds"]) for r in run.requests if r.get("server")]
    seconds = sum(each for _, each in own)
    return sum(tokens for tokens, _ in own) / seconds if seconds else None


def _values(name: str, task: TaskRun, field: str, flag: str) -> dict[int, str]:
    """By document, the field's value, as text."""
    for i, sample in task.samples.items():
        if field not in sample.doc:
            known = ", ".join(sorted(map(str, sample.doc)))
            raise FlyError(
                f"{flag} {field}: {name}, document {i} has no such field: choose from {known}"
            )
    values = {i: sample.doc[field] for i, sample in task.samples.items()}
    return {
        i: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for i, v in values.items()
    }


def _find_shared_field(task: TaskRun) -> str:
    """The first field of long texts, such as passages, that some documents have in common, but not
    all; empty without one."""
    for field in next(iter(task.samples.values())).doc:
        texts = [sample.doc.get(field) for sample in task.samples.values()]
        long = [text for text in texts if isinstance(text, str) and len(text) >= _LONG]
        if 1 < len({*long}) < len(long):
            return field
    return ""


def _metrics(task: TaskRun, run_name: str, notes: list[str]) -> Iterator[Metric]:
    """All metrics. Those that are no means over documents are left out, with a note about each;
    those without a number for some documents allow no verdict."""
    for name, higher in task.higher_is_better.items():
        scores = {i: s.scores[name] for i, s in task.samples.items() if name in s.scores}
        scores = {i: score for i, score in scores.items() if abs(score) <= LARGEST}
        mean = sum(scores.values()) / len(scores) if scores else math.nan
        value = task.aggregated.get(name, (mean, None))[0]
        why = ""
        if missing := len(task.documents[name] - scores.keys()):
            why = f"{missing} of {len(task.documents[name])} documents have no number"
        elif not math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-9):
            why = _NO_MEAN
        metric = Metric(
            name=name, filter=task.filter, higher_is_better=higher, scores=scores, left_out=why
        )
        if why:
            end = "no verdict" if metric.has_row else "left out"
            notes.append(f"{run_name}: {task.name} {metric.label}: {why}; {end}")
        yield metric


def _requests(run: Run) -> dict[str, dict[int, list[RequestLine]]]:
    """By task and document; empty without fly's records."""
    requests: dict[str, dict[int, list[RequestLine]]] = defaultdict(lambda: defaultdict(list))
    for record in run.requests:
        requests[record["task"]][record["doc_id"]].append(record)
    return requests


def _positions(records: Iterable[RequestLine]) -> Positions:
    found = Positions()
    for record in records:
        found.add(Positions(**record.get("positions", {})))
    return found


def _sum(records: list[RequestLine]) -> Work:
    lengths, seconds = Lengths(), dict.fromkeys(TIMED, 0.0)
    for record in records:
        positions, taken = _positions([record]), dict[str, Any](record["seconds"])
        accepted = sum(positions.accepted)
        lengths.add(Lengths(record["emitted"], record["rounds"], accepted, positions.drafts))
        seconds = {phase: seconds[phase] + taken[phase] for phase in TIMED}
    return Work(
        tokens=lengths.emitted,
        rounds=lengths.rounds,
        decode=round(sum(seconds[phase] for phase in DECODING), 6),
        end_to_end=round(sum(seconds.values()), 6),
        accepted=lengths.accepted,
        drafts=lengths.drafts,
    )


def _drafts(run: Run) -> Drafts | None:
    if not run.sources and not run.draft_runs:
        return None
    told = (run.entry or {}).get("draft_runs") or {}
    same_target, from_earlier = told.get("same_target"), bool(run.draft_runs)
    return Drafts(sources=run.sources, from_earlier_runs=from_earlier, same_target=same_target)


def _outputs(run: Run) -> dict[str, Outputs]:
    """By task, the token ids in the run's records, in the order of the repeats. Requests of a
    document whose prompt is not the scored one have no place here."""
    prompts = {
        (task.name, doc_id): sample.hashes[1]
        for task in run.tasks.values()
        for doc_id, sample in task.samples.items()
    }
    found: dict[str, Outputs] = {}
    for line in sorted(run.outputs, key=lambda line: line.get("repeat", 0)):
        output, name = line.get("output"), line["task"]
        if output is None or prompts.get((name, line["doc_id"])) != line["prompt_hash"]:
            continue
        of_task = found.setdefault(name, Outputs(tokenizer=output["tokenizer"], ids={}))
        if of_task.tokenizer == output["tokenizer"]:
            of_task.ids.setdefault(line["doc_id"], []).append(output["ids"])
    return found


# ---------------------------------------------------------------------------- what was decoded


def _target(run: Run) -> dict[str, str | None]:
    config, entry = run.results["config"], run.entry
    arguments = config.get("model_args") or {}
    if entry:
        served = (entry.get("server") or {}).get("model")
        name, dtype = served or entry["config"]["target_model_path"], entry["dtype"]
    else:
        name = arguments.get("pretrained") or arguments.get("model")  # of lm-eval's API models
        dtype = config.get("model_dtype")
        if arguments.get("gguf_file"):
            name = str(Path(str(name)) / arguments["gguf_file"])
    return {
        "name": None if name is None else str(name),
        "dtype": None if dtype is None else str(dtype),
        "revision": str(config.get("model_sha") or "") or None,
        "files": fingerprint(str(name)),
    }


def fingerprint(model: str) -> str | None:
    """One hash of a local model's files; None for hub ids and for models that are not here."""
    try:
        files = hash_model(sources.resolve_source(model, "target_model_path")).get("files")
    except FlyError:
        return None
    return as_one(files) if files else None


def _decoding(run: Run) -> dict[str, Any]:
    """Settings that may change the target's own texts, besides what the prompts' hashes cover."""
    config, entry = run.results["config"], run.entry
    found: dict[str, Any] = {
        "gen_kwargs": config.get("gen_kwargs") or {},
        "max_length": run.results.get("max_length"),
        "total_gen_tok": entry["config"]["total_gen_tok"] if entry else None,
        # lm-eval's cache answers requests that fly hears nothing of
        "sampling": entry.get("sampling") if entry and not config.get("use_cache") else None,
    }
    if any(sampling["temperature"] for sampling in found["sampling"] or []):
        seed = entry["config"]["seed"] if entry else None
        found["seed"] = config.get("torch_seed") if seed is None else seed
    return found


def _machine(run: Run) -> dict[str, Any]:
    """What a run's seconds depend on besides what it decodes; empty without fly's records.

    Facts of the draft are left out: they are part of what is compared.
    """
    if run.entry is None:
        return {}
    entry, device = run.entry, run.entry.get("device") or {}
    server = entry.get("server") or {}
    version = (entry.get("vllm") or server).get("version")
    engine = server.get("kind", run.engine)
    found = {
        "engine": f"{engine} {version}" if version else engine,
        "device": device.get("name"),
        "capability": device.get("capability"),
        "threads": device.get("threads") if device.get("type") == "cpu" else None,
        "processes": entry.get("processes", 1),
        "batch_size": server.get("num_concurrent", run.batch_size),
        "dtype": entry["dtype"] if device else None,
        "passes": (entry.get("preparation") or {}).get("target"),
        "compile": entry["config"].get("compile"),
    }
    return {key: value for key, value in found.items() if value is not None}


# ------------------------------------------------------------------------------ baseline files


def save(measured: Measured, path: Path, *, with_outputs: bool = False) -> None:
    """Write a baseline file. Raises FlyError if outputs are asked for and some are not there."""
    leave_out: dict[str, Any] = {}
    of_task: dict[str, Any] = {}
    if not measured.drafts:  # an earlier fly can read it then
        leave_out["drafts"] = of_task["positions"] = True
        of_task["work"] = {"__all__": {"accepted", "drafts"}}
    if with_outputs:
        _check_outputs(measured)
    else:
        of_task["outputs"] = True
    leave_out["tasks"] = {"__all__": of_task}
    write_output(path, measured.model_dump_json(exclude=leave_out) + "\n", "--save-baseline")


def _check_outputs(measured: Measured) -> None:
    for name, task in measured.tasks.items():
        known = task.outputs.ids if task.outputs else {}
        # lm-eval gives every task that generates some settings, and others have no outputs
        for doc_id in task.documents if task.generation else ():
            if doc_id not in known:
                raise FlyError(
                    f"--with-outputs: {measured.name} has no token ids of {name}, document {doc_id}"
                    ": fly's own records have them (enable_statistics=true): make the run anew"
                )


def check_storable(mode: str, flag: str) -> None:
    """Refuse runs of a rule: a stored baseline stands for the target itself."""
    if mode in registry.RULES:
        raise FlyError(
            f"{flag}: a run of mode {mode} is no baseline to be stored: take target-only's, or "
            "compare the finished runs themselves"
        )


def read(path: Path) -> Measured:
    """Read a baseline file."""
    where = f"--baseline {path}"
    try:
        found = Measured.model_validate(reading.read_object(path, where))
    except ValidationError as error:
        problem = reading.problem(error, f"{where}, not a baseline file")
        raise FlyError(f"{problem}: make one with --save-baseline") from None
    for name, task in found.tasks.items():
        scored = [set(metric.scores) for metric in task.metrics if not metric.left_out]
        for documents in [*scored, *([set(task.work)] if task.work else [])]:
            if not documents or not documents <= set(task.documents):
                raise FlyError(
                    f"{where}: {name}: its scores are not of its documents: make it anew"
                )
    return found
