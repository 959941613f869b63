"""The peers of throughput.py, each measured in a process of its own: `python peers.py SPEC.json`.

A worker loads its models, decodes one short warm-up prompt, then all prompts against the clock,
and writes one JSON result to the file that the spec names. It returns token ids and judges
nothing: the parent counts the tokens of all peers by the same rule. vLLM has an interpreter of
its own and so a script of its own, vllm_peer.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from fly.execution.device import peak_memory_bytes
from fly.harness.hf import FlyLM
from fly.runs.environment import versions
from fly.runs.records import DECODING, RequestRecord, RunStats


@dataclass(frozen=True)
class Prompt:
    """One request of lm-eval. `ids` is `text` as HFLM encodes it, `stops` the stop strings."""

    index: int
    text: str
    ids: list[int]
    gen_kwargs: dict[str, Any]
    stops: list[str]
    budget: int


@dataclass(frozen=True)
class Spec:
    """What a worker is told. `target` and `draft` are folders or hub ids, `gguf` their files where
    they are of such. `dtype` None is the checkpoint's; `eos_ids` are for vLLM."""

    peer: str
    batch_size: int
    config: str
    overrides: dict[str, Any]
    target: str
    draft: str | None
    gguf: dict[str, str]
    dtype: str | None
    device: str
    threads: int
    eos_ids: list[int]
    prompts: str
    result: str


@dataclass
class Output:
    """Generated ids as the peer returned them (padding and all), and its share of the time."""

    ids: list[int]
    seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Generator(Protocol):
    """A loaded peer."""

    def generate(self, prompts: list[Prompt]) -> list[Output]:
        """Decode greedily; one output per prompt, in order."""

    def facts(self) -> dict[str, Any]:
        """What else to keep of the last `generate`."""


def _instances(prompts: list[Prompt]) -> list[Instance]:
    return [
        Instance(
            request_type="generate_until",
            doc={},
            arguments=(prompt.text, dict(prompt.gen_kwargs)),
            idx=0,
            metadata=("throughput", prompt.index, 1),
        )
        for prompt in prompts
    ]


def _load_hf(spec: Spec, kind: type[HFLM]) -> HFLM:
    return kind(
        pretrained=spec.target,
        dtype=spec.dtype or "auto",
        device=spec.device,
        batch_size=spec.batch_size,
    )


class CapturingHF(HFLM):
    """lm-eval's own backend; keeps the ids that it decodes, by prompt: batches are sorted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.captured: dict[tuple[int, ...], list[Output]] = defaultdict(list)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> torch.Tensor:
        mask = kwargs["attention_mask"]
        start = time.perf_counter()
        output = super()._model_generate(context, max_length, stop, **kwargs)
        rows = output[:, context.shape[1] :].tolist()
        share = (time.perf_counter() - start) / len(rows)
        for ids, used, row in zip(context, mask.bool(), rows):
            self.captured[tuple(ids[used].tolist())].append(Output(row, share))
        return output


class PlainHF:
    """lm-eval's `--model hf`, as a user runs it."""

    def __init__(self, spec: Spec) -> None:
        self.lm: Any = _load_hf(spec, CapturingHF)

    def generate(self, prompts: list[Prompt]) -> list[Output]:
        self.lm.captured.clear()
        self.lm.generate_until(_instances(prompts), disable_tqdm=True)
        return [self.lm.captured[tuple(prompt.ids)].pop(0) for prompt in prompts]

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self.lm.model.dtype)}


class StopText(StoppingCriteria):
    """Stop once a stop string is anywhere in the output: a round may add it amid other tokens.

    lm-eval's and transformers' own criteria look at the last tokens only, and would let assisted
    generation run on to the budget.
    """

    def __init__(self, lm: HFLM, prompt: Prompt) -> None:
        self.decode, self.prompt = lm.tokenizer.decode, prompt

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        text = self.decode(input_ids[0, len(self.prompt.ids) :])
        found = any(stop in text for stop in self.prompt.stops)
        return torch.full((len(input_ids),), found, device=input_ids.device)


class Assisted:
    """transformers' `generate` with a drafting method of its own. Batch size 1 only."""

    def __init__(self, spec: Spec) -> None:
        self.lm = _load_hf(spec, HFLM)
        self.method = self._method(spec)

    def _method(self, spec: Spec) -> dict[str, Any]:
        if spec.draft is None:
            raise ValueError("the configuration names no draft model")
        draft: Any = AutoModelForCausalLM.from_pretrained(spec.draft, dtype=self.lm.model.dtype)
        return {"assistant_model": draft.to(spec.device).eval()}

    def generate(self, prompts: list[Prompt]) -> list[Output]:
        return [self._one(prompt) for prompt in prompts]

    def _one(self, prompt: Prompt) -> Output:
        start = time.perf_counter()
        ids = torch.tensor([prompt.ids], device=self.lm.device)
        model: Any = self.lm.model
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prompt.budget,
            do_sample=False,
            pad_token_id=self.lm.tokenizer.pad_token_id,
            stopping_criteria=StoppingCriteriaList([StopText(self.lm, prompt)]),
            **self.method,
        )
        return Output(output[0, len(prompt.ids) :].tolist(), time.perf_counter() - start)

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self.lm.model.dtype)}


class PromptLookup(Assisted):
    """transformers' prompt lookup decoding."""

    def _method(self, spec: Spec) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": 10}


class KeepingFly(FlyLM):
    """fly's backend; hands its per-request records to the benchmark, not to a file."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kept: dict[int, RequestRecord] = {}

    def keep(self, instance: Instance, text: str, record: RequestRecord, log: Any) -> None:
        assert instance.doc_id is not None
        self.kept[instance.doc_id] = record


class Fly:
    """FlyLM under the pair's configuration, with the peer's keys replaced."""

    def __init__(self, spec: Spec) -> None:
        dtype = {"dtype": spec.dtype} if spec.dtype else {}
        self.lm = KeepingFly(
            config_path=spec.config,
            device=spec.device,
            batch_size=spec.batch_size,
            **dtype,
            **spec.overrides,
        )
        self.prepare_seconds = self.lm.stats.seconds["compile"]

    def generate(self, prompts: list[Prompt]) -> list[Output]:
        self.lm.kept.clear()
        self.lm.stats = RunStats()
        self.lm.generate_until(_instances(prompts), disable_tqdm=True)
        return [self._output(self.lm.kept[prompt.index]) for prompt in prompts]

    def _output(self, record: RequestRecord) -> Output:
        seconds = sum(value for phase, value in record.seconds.items() if phase != "compile")
        return Output(list(record.tokens), round(seconds, 6), record.as_dict())

    def facts(self) -> dict[str, Any]:
        return {
            "dtype": str(self.lm.model.dtype),
            "config": self.lm.fly_config.model_dump(),
            "prepare_seconds": self.prepare_seconds,
            "stats": self.lm.stats.as_dict(),
            "decode_seconds": sum(self.lm.stats.seconds[phase] for phase in DECODING),
        }


class LlamaCpp:
    """llama.cpp's server (.ci/llama_cpp.sh) on the same GGUF files, prompts and stops."""

    def __init__(self, spec: Spec, drafting: tuple[str, ...] = ()) -> None:
        if "target" not in spec.gguf:
            raise ValueError("llama.cpp reads GGUF files: the configuration names none")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [os.environ["LLAMA_SERVER"], "--host", "127.0.0.1", "--port", str(port)]
        command += ["-m", spec.gguf["target"], "-t", str(spec.threads), "--no-webui"]
        command += ["--parallel", str(spec.batch_size), "-c", str(4096 * spec.batch_size)]
        if drafting:
            command += ["-md", spec.gguf["draft"], *drafting]
        self.command, self.url = command, f"http://127.0.0.1:{port}"
        self.server = subprocess.Popen(command)  # of this process's group: ends with it
        self.slots = spec.batch_size
        self.seconds = 0.0
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except OSError:
                if self.server.poll() is not None:
                    raise RuntimeError("llama-server ended before it was ready") from None
                time.sleep(0.2)

    def generate(self, prompts: list[Prompt]) -> list[Output]:
        with ThreadPoolExecutor(self.slots) as pool:
            outputs = list(pool.map(self._one, prompts))
        self.seconds = sum(output.facts["predicted_ms"] for output in outputs) / 1000
        return outputs

    def _one(self, prompt: Prompt) -> Output:
        start = time.perf_counter()
        body = {
            "prompt": prompt.ids, "n_predict": prompt.budget, "temperature": 0,
            "stop": prompt.stops, "return_tokens": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        return Output(found["tokens"], time.perf_counter() - start, found["timings"])

    def facts(self) -> dict[str, Any]:
        # several sequences share their passes: seconds of each say nothing of all
        alone = {"decode_seconds": self.seconds} if self.slots == 1 else {}
        options = [part for part in self.command if "/" not in part]
        return {"dtype": "gguf", "options": options, **alone}


def _llama_cpp_drafting(tokens: int) -> Callable[[Spec], LlamaCpp]:
    drafting = ("--spec-type", "draft-simple", "--spec-draft-n-max", str(tokens))
    return lambda spec: LlamaCpp(spec, drafting)


@dataclass(frozen=True)
class Peer:
    """`load` None: vllm_peer.py. `batches` False: batch size 1 only. `overrides`: fly's keys.
    `dtype`: the peer's own, whatever the others have."""

    load: Callable[[Spec], Generator] | None
    batches: bool = True
    overrides: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None


_LEVERS_OFF: dict[str, dict[str, Any]] = {
    "fly-no_prefix_reuse": {"prefix_reuse": False},
    "fly-no_compile": {"compile": "off"},
    "fly-no_quantization": {"draft_quantization": "none"},
}
_ALL_OFF = {key: value for off in _LEVERS_OFF.values() for key, value in off.items()}

# fly without batching needs no peer of its own: that is fly at batch size 1.
LEVERS: dict[str, Peer] = {
    name: Peer(Fly, overrides=off)
    for name, off in {
        **_LEVERS_OFF,
        "fly-no_levers": _ALL_OFF,
        "fly-fixed_length": {"draft_policy": "fixed"},
        "fly-no_ngram": {"use_ngram": False},
    }.items()
}
VLLM: dict[str, Peer] = {
    "vllm": Peer(None),
    "vllm_draft": Peer(None),
    "fly_vllm": Peer(None, overrides={"enable_fly": False, "use_ngram": False, "spd_k": 5}),
}
LLAMA_CPP: dict[str, Peer] = {
    "llama_cpp": Peer(LlamaCpp),
    "llama_cpp_draft3": Peer(_llama_cpp_drafting(3)),
    "llama_cpp_draft8": Peer(_llama_cpp_drafting(8)),
}
DEFAULT: dict[str, Peer] = {
    "hf": Peer(PlainHF),
    "assisted": Peer(Assisted, batches=False),
    "prompt_lookup": Peer(PromptLookup, batches=False),
    "target_only": Peer(Fly, overrides={"use_sd": False}),
    "exact": Peer(Fly, overrides={"enable_fly": False}),
    "fly": Peer(Fly),
}
MORE: dict[str, Peer] = {
    "hf_float32": Peer(PlainHF, dtype="float32"),
    "assisted_float32": Peer(Assisted, batches=False, dtype="float32"),
    "fly_across": Peer(Fly, overrides={"defer_across_rounds": True, "spd_k": 5}),
}
PEERS: dict[str, Peer] = {**DEFAULT, **MORE, **LEVERS, **VLLM, **LLAMA_CPP}


def measure(spec: Spec) -> dict[str, Any]:
    """Load, warm up, and time one pass over all prompts: prefill and decoding, nothing else."""
    torch.set_num_threads(spec.threads)
    data = json.loads(Path(spec.prompts).read_text(encoding="utf-8"))
    prompts = [Prompt(**prompt) for prompt in data["prompts"]]
    load = PEERS[spec.peer].load
    assert load is not None, "vLLM's peers run in vllm_peer.py"
    start = time.perf_counter()
    peer = load(spec)
    loaded = time.perf_counter()
    peer.generate([Prompt(**data["warm_up"])])
    warm = time.perf_counter()
    outputs = peer.generate(prompts)
    seconds = time.perf_counter() - warm
    return {
        "seconds": seconds,
        "load_seconds": loaded - start,
        "warm_up_seconds": warm - loaded,
        "outputs": [asdict(output) for output in outputs],
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": peak_memory_bytes(torch.device(spec.device)),
        "versions": versions(),
        **peer.facts(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("spec", type=Path, metavar="SPEC.json", help="a Spec, by throughput.py")
    path: Path = parser.parse_args().spec
    logging.basicConfig(level=logging.INFO)
    spec = Spec(**json.loads(path.read_text(encoding="utf-8")))
    try:
        result = measure(spec)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        failure = {"error": f"{type(error).__name__}: {lines[0][:300]}"}
        Path(spec.result).write_text(json.dumps(failure), encoding="utf-8")
        raise
    Path(spec.result).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
