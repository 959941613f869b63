"""The keys of a pair's JSON, one group for each room that reads them.

A file holds all groups' keys side by side. `fly.config.FlyConfig` is each of these groups, so that
a room takes a configuration as the group that it reads.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, PydanticKnownError

from fly import registry

EntropyKind = Literal["top3", "full", "normalized"]
TextSourceName = Literal["runs", "own"]
# Keys, values as `key=value` (of a list: one item), flags as `--flag` and commands as `fly command`
# that fly had once, and what to do instead. Finished runs that have them are read as ever.
GONE = {
    "--max_changed": "fly tune runs its candidates: --min-recovery decides",
    "--draft_quantization": "it is the configuration's own: --model_args draft_quantization=...",
    "--memory": "docs/scale.md has the memory of the shipped pairs, and how to count any other's",
    "fly plot": "`fly report RUN...` draws the figures, and saves them as SVG and CSV",
    "fly trace": "`fly report RUN` shows the tokens of a run with trace=true by their sources",
    "execution=onednn": "set it to auto: fly's kernels where they work, else the model's passes",
    "draft_quantization=int4": "set it to auto: int8 takes as long, but for a few percent",
    "draft_quantization=fp8": "name a quantised checkpoint as the draft, and set it to none",
    "tp_plan": "start one process per GPU, each with the whole pair, or shard it with --model vllm",
    "draft_sources=siblings": "write runs, own or both, or leave the key out",
    "draft_sources=others": "write runs, own or both, or leave the key out",
}
# A backtick, at most three spaces into its line.
_FENCE = "`(?:(?<=^`)|(?<=^ `)|(?<=^  `)|(?<=^   `))"
# Names for `exact_pattern`. All that begins a match is one itself, so that all of it stays exact.
EXACT_PATTERNS = {
    "numbers": r"\d[\d.,]*",
    # from the ``` that opens a block to the one that closes it, or as far as the text goes
    "code_fences": rf"(?ms){_FENCE}(?:`?\Z|``[^`\n]*(?:\Z|\n.*?(?:\Z|^ {{0,3}}```[ \t]*$)))",
}


def _as_tuple(value: Any) -> Any:
    """A list in the JSON, or what the command line has: `a,b`, `[a,b]` or one name."""
    if isinstance(value, str):
        listed = value[1:-1] if value[:1] + value[-1:] == "[]" else value
        parts = (part.strip(" '\"") for part in listed.split(","))
        return tuple(part for part in parts if part)
    return tuple(value) if isinstance(value, list) else value


def _texts(value: Any) -> Any:
    """The same for texts, as a list: command lines turn those of digits into numbers."""
    items = _as_tuple((value,) if type(value) is int else value)
    if not isinstance(items, tuple):
        return items
    return [str(item) if type(item) is int else item for item in items]


def _check_known(names: Mapping[str, Any]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in names:
            *others, last = map(repr, names)
            raise PydanticKnownError(
                "literal_error", {"expected": f"{', '.join(others)} or {last}"}
            )
        return name

    return check


def _patterns(value: Any) -> Any:
    """One name or regular expression, or a list; of a command line also `[numbers,code_fences]`."""
    if isinstance(value, str):
        names = _as_tuple(value)
        is_empty = value in ("", "[]")
        return names if is_empty or (names and set(names) <= {*EXACT_PATTERNS}) else (value,)
    return _as_tuple(_texts(value))


def _check_pattern(pattern: str) -> str:
    why = ""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        why = str(error)
    if pattern not in EXACT_PATTERNS and difflib.get_close_matches(pattern, EXACT_PATTERNS):
        why = f"write ({pattern}) if the word itself is meant"
    if why:
        raise PydanticCustomError(
            "pattern",
            "Input should be {names} or a regular expression: {why}",
            {"names": ", ".join(EXACT_PATTERNS), "why": why},
        )
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]
Paths = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1),
    BeforeValidator(_texts, json_schema_input_type=list[str] | str),
]
DrafterName = Annotated[
    str,
    AfterValidator(_check_known(registry.DRAFTERS)),
    Field(json_schema_extra={"enum": [*registry.DRAFTERS]}),
]
Verification = Annotated[
    str,
    AfterValidator(_check_known(registry.RULES)),
    Field(json_schema_extra={"enum": [*registry.RULES]}),
]


class Settings(BaseModel):
    """A group of keys: checked, and fixed from then on."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # they describe the keys in the JSON schema
        defer_build=True,  # commands that read finished runs validate no settings
    )


class ModelSettings(Settings):
    """Which two models, and where the draft lies."""

    target_model_path: str
    """Target model: hub id, local folder, .gguf file, or pair:NAME/target for an embedded pair. The
    scores are this model's."""
    draft_model_path: str | None = None
    """Draft model, in the same forms. `pretrained=` in model_args overrides it. Not needed by
    drafter=ngram or use_sd=false."""
    draft_revision: str | None = None
    """Branch, tag or commit of a draft model that lies on a hub. null: its main branch. `revision`
    in model_args is the target's."""
    draft_device: str | None = None
    """Device of the draft model, e.g. cuda:1 or cpu. null: the target's."""
    draft_dtype: str | None = None
    """dtype of the draft model, e.g. bfloat16. null: the target's."""
    head_layer_ids: (
        Annotated[
            tuple[Annotated[int, Field(ge=0, strict=False)], ...],
            BeforeValidator(_as_tuple, json_schema_input_type=list[int] | str),
        ]
        | None
    ) = None
    """Hidden states of the target that a trained head reads, as transformers numbers them: 0 the
    embeddings, i the output of layer i - 1. null: as the head's files say (docs/drafters.md)."""
    dual_tok: bool = False
    """Draft and target with different tokenizers: the tokens that both have are drafted
    (docs/drafters.md). false refuses such a pair."""


class DrafterSettings(Settings):
    """What proposes tokens, and how many."""

    use_sd: bool = True
    """false decodes with the target alone, through the same engine."""
    drafter: DrafterName | None = None
    """model: the draft model. ngram: texts alone (draft_sources), no second model. cascade: what a
    text promises is drafted from it, else the draft model drafts, with n-grams that it verifies.
    eagle3: draft_model_path is a trained EAGLE-3 head of the target, block: a DFlash or DSpark head
    (docs/drafters.md). mtp and suffix: vLLM's own, for --model vllm only. null: cascade if
    use_ngram, else model; with draft_runs cascade if there is a draft model, else ngram."""
    use_ngram: bool | None = None
    """Accelerate the draft model by n-gram lookup (the cascade). null: where fly's kernels compute
    its passes; on an accelerator each lookup would make the host wait."""
    spd_k: int = Field(15, ge=0, le=256)
    """K: most draft tokens per round. 0 is the target alone."""
    confidence_thre: float | None = Field(None, ge=0, le=1)
    """drafter=block with a DSpark head: a draft ends before the first token that its confidence
    head gives less than this of being accepted (docs/drafters.md). null: never."""
    max_ngram_size: int = Field(4, ge=1, le=32)
    """Longest suffix that is looked up, in tokens."""
    min_ngram_size: int = Field(1, ge=1, le=32)
    """Shortest suffix that is looked up, in tokens."""
    num_ngram_pred_tokens: int = Field(6, ge=1, le=256)
    """Most tokens that one n-gram lookup proposes."""
    draft_sources: Annotated[tuple[TextSourceName, ...], BeforeValidator(_as_tuple)] | None = None
    """Texts that ngram and cascade draft from. runs: outputs of draft_runs for the same document.
    own: the sequence's own prompt and output. null: both."""
    lookup_k: int | None = Field(None, ge=1, le=256)
    """Most tokens per round that are drafted from texts. null: spd_k if model_args set it, else as
    many as the machine verifies at little cost, at most 128."""
    draft_runs: Paths | None = None
    """Earlier runs whose outputs are drafted from where task, document and prompt are the same:
    folders, results files or baselines with outputs; in model_args also draft_runs=A,B. Exact
    verification then, unless verification says otherwise. null: none."""
    draft_policy: Literal["auto", "fixed"] = "auto"
    """fixed: spd_k tokens every round. auto: as many of them as pay for the running sequences on
    this machine, by relative pass costs and counts; where the number would change texts (FLy and
    other lossy rules, sampling) spd_k or none (on a GPU spd_k), by a fixed rule for the whole run,
    which is logged."""

    @property
    def longest_lookup(self) -> int:
        """The limit that `lookup_k` means."""
        return self.lookup_k or 128


class RuleSettings(Settings):
    """Which verification rule is in force."""

    enable_fly: bool = True
    """false is exact verification: lossless speculative decoding."""
    verification: Verification | None = None
    """Which draft tokens stand. fly: also mismatches that pass the gates and whose window holds.
    exact: none but the target's own. typical: Medusa's typical acceptance. top_k: TensorRT-LLM's
    relaxed acceptance. accept_all: no verification, the lower bound of accuracy. block: exact, a
    draft as a whole when sampling. The others are in docs/verification.md. null: fly if enable_fly
    and no draft_runs, else exact."""
    vllm_verification: Literal["fly", "vllm"] | None = None
    """With --model vllm: whose code verifies. fly: fly's own, as a plugin, with all rules and keys
    but windows across rounds. vllm: vLLM's own exact verification and FLy (docs/vllm.md). null:
    vllm for exact verification, else fly."""


class PlaceSettings(Settings):
    """Where lossy rules decide as exact verification does."""

    exact_first_tokens: int = Field(0, ge=0)
    """Lossy rules let no mismatch stand at the first so many places of an output: they are exact
    verification's."""
    exact_pattern: (
        Annotated[
            tuple[Pattern, ...],
            BeforeValidator(_patterns, json_schema_input_type=list[str] | str),
        ]
        | None
    ) = None
    """Lossy rules let no mismatch stand where the draft's or the target's token would be in a match
    of this in the text so far: numbers, code_fences, a regular expression, or a list of these.
    null: nowhere."""

    relax_in: Literal["everywhere", "thinking", "answer"] = "everywhere"
    """Where lossy rules may let a mismatch stand. thinking: from the model's opening to its closing
    think token, to the end if it closes none. answer: elsewhere. The think tokens themselves are
    exact verification's then."""
    think_tokens: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(min_length=2, max_length=2),
        BeforeValidator(_as_tuple, json_schema_input_type=list[str] | str),
    ] = ("<think>", "</think>")
    """What opens and what closes a thought, for relax_in: tokens of the target, or texts."""

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """`exact_pattern` as verification uses it."""
        return tuple(re.compile(EXACT_PATTERNS.get(p, p)) for p in self.exact_pattern or ())


class FlySettings(PlaceSettings):
    """The keys of FLy (arXiv 2511.22972, section 3.2): gates and window."""

    entropy_thre: float | None = Field(0.3, ge=0)
    """theta: a mismatch may be deferred only where the target's entropy is at least this; in the
    unit of entropy_kind. null switches the gate off."""
    win_len: int = Field(6, ge=0)
    """W: how many draft tokens after a deferred mismatch must all match the target. 0 is no window.
    (The reference code checks W-1.)"""
    entropy_kind: EntropyKind = "top3"
    """top3: over the 3 largest probabilities, nats, not renormalised (what 0.3 was tuned for).
    full: whole vocabulary, nats. normalized: full divided by ln V, 0 to 1."""
    margin_thre: float | None = Field(None, ge=0, le=1)
    """A further gate of fly: the target's two largest probabilities differ by at most this (0 to
    1). null switches it off. All gates that are on must pass."""
    draft_ratio_thre: float | None = Field(None, ge=0, le=1)
    """A further gate of fly: the draft token's target probability is at least this share of the
    largest one (0 to 1). null switches it off."""
    draft_rank_max: int | None = Field(None, ge=1)
    """A further gate of fly: at most this place of the draft token among the target's tokens by
    probability (2 is the second). null switches it off."""
    defer_across_rounds: bool = False
    """Later rounds may complete the window of a deferral; until then its tokens are provisional.
    false is the paper's rule: the window must fit into the round's draft."""
    window_rule: Literal["paper", "reference"] = "paper"
    """paper: win_len following tokens are checked. reference: win_len - 1 are checked though
    win_len must follow, as the reference code does; to repeat its runs."""
    abla_no_window: bool = False
    """Ablation of the reference: accept every mismatch that passes the gate."""

    @property
    def window(self) -> int:
        """W as verification uses it."""
        return 0 if self.abla_no_window else self.win_len


class TypicalSettings(PlaceSettings):
    """The keys of typical acceptance (Medusa, arXiv 2401.10774)."""

    typical_epsilon: float = Field(0.09, gt=0, lt=1)
    """verification=typical: the hard threshold, a probability."""
    typical_delta: float = Field(0.3, gt=0, lt=1)
    """verification=typical: the soft threshold is this times exp(-entropy in nats)."""


class TopKSettings(PlaceSettings):
    """The keys of TensorRT-LLM's relaxed acceptance."""

    relaxed_top_k: int = Field(10, ge=1)
    """verification=top_k: the token is among so many likeliest ones."""
    relaxed_delta: float = Field(0.6, ge=0, le=1)
    """verification=top_k: the largest probability exceeds the token's by at most this."""


class SamplingSettings(Settings):
    """How tokens are chosen where a task's gen_kwargs do not say."""

    temperature: float = Field(0.0, ge=0)
    """0 is greedy. A task's gen_kwargs win over it."""
    top_k: int | None = Field(None, ge=0)
    """When sampling: only the so many likeliest tokens; 0 is off. As for the next three, a task's
    gen_kwargs win, and null leaves it to the target's generation_config."""
    top_p: float | None = Field(None, gt=0, le=1)
    """When sampling: the fewest tokens that hold this probability; 1 is off."""
    min_p: float | None = Field(None, ge=0, le=1)
    """When sampling: tokens of at least this share of the largest probability."""
    repetition_penalty: float | None = Field(None, gt=0)
    """Penalty on tokens of the prompt and output; 1 is off."""
    seed: int | None = Field(None, ge=0)
    """Where every request's random numbers start. null: lm-eval's --seed for torch."""
    total_gen_tok: int | None = Field(None, ge=1)
    """Cap on generated tokens per request, beside the task's max_gen_toks."""


class ExecutionSettings(Settings):
    """How forward passes are computed."""

    compile: Literal["auto", "inductor", "off"] = "auto"
    """auto: fly's kernels on a CPU (see execution); on a GPU CUDA graphs, of fly's own layers where
    it has kernels for them; a logged reason where neither applies. inductor: passes are compiled by
    PyTorch before they are captured, GPUs only: slower than fly's layers, for models that fly has
    none for. off: the model's own eager passes."""
    execution: Literal["auto", "kernels", "eager"] = "auto"
    """How a CPU computes the passes of bfloat16 models. kernels: fly's own, for x86-64 with AVX2,
    AVX-512 or AMX. eager: the model's own passes. auto: kernels where they work, else eager."""
    batch_invariant: bool | Literal["auto"] = "auto"
    """A token's bits in the target are the same in every pass: whatever its width, the running
    sequences, copied prefixes, with or without speculation. So exact verification gives the
    target's own texts in bfloat16, too. By fly's kernels on x86-64 CPUs, by passes of one shape on
    GPUs. auto: wherever the kernels compute the target's passes, where it costs little."""
    threads: int | None = Field(None, ge=1, le=4096)
    """Threads of a CPU's passes. null: PyTorch's choice (OMP_NUM_THREADS), at most the cores that
    this process may use."""
    draft_quantization: Literal["auto", "none", "int8"] = "auto"
    """Weights of the draft model; exact verification stays lossless, FLy may accept other tokens.
    int8: with fly's kernels (see execution). auto: int8 with them, else none. On a GPU a quantised
    checkpoint can be the draft."""
    prefix_reuse: bool = True
    """Order requests by their prompts and copy the K/V of shared prefixes instead of computing them
    again."""


class OutputSettings(Settings):
    """What is written down of a run. Changes no text and no score."""

    enable_statistics: bool = True
    """Print the speed table and write per-request records."""
    verbose: bool = False
    """Log one line per round."""
    trace: bool = False
    """Write every round to fly_trace_*.jsonl beside the samples (docs/report.md)."""


RECORDING_KEYS = tuple(OutputSettings.model_fields)


def settings_of_rule(name: str) -> type[Settings]:
    """A verification rule's keys; none of a finished run's that is not registered any more."""
    entry = registry.RULES.get(name)
    return Settings if entry is None else registry.load(entry.settings)
