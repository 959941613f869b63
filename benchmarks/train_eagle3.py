"""Trains an EAGLE-3 head on texts that its target wrote, and saves it in speculators' format.

    python benchmarks/train_eagle3.py --target pair:qwen2.5-coder/target \\
        --prompts gsm8k_train_200.jsonl.gz --functions 200 --output heads/qwen --minutes 40

Texts: one greedy answer per prompt and further sampled ones, kept in --output, so that the next
start trains at once. Give prompts of a training split only; --functions adds functions of Python's
standard library to be completed. Training-time test (arXiv 2503.01840):
every pair is drafted from for several steps at once, each over the true pairs before it and its own
earlier steps, under the target's distributions as soft labels. One text in ten is held out; its
agreement by step is printed with every report.

Shapes: B texts, N tokens of a text, F features of a token, H hidden size, D draft ids, V target
ids.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import re
import sysconfig
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exported import as_folder
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from fly.execution import weights
from fly.execution.heads.eagle3 import Eagle3Head
from fly.execution.model_runner import ModelRunner, causal_mask
from fly.models.heads.checkpoint import Checkpoint, TargetShape
from fly.models.heads.eagle3 import usual_layers
from fly.models.sources import resolve_source
from fly.models.tokenizers import eos_token_ids
from fly.settings import ExecutionSettings, Settings
from fly.speculation.drafters.base import NoDrafter
from fly.speculation.engine import Engine
from fly.speculation.rules.exact import ExactRule
from fly.speculation.sampling import GREEDY, Sampling
from fly.speculation.sequence import Request

DECAY = 0.8  # of a step's weight in the loss, from step to step


class StepCache:
    """K/V of all steps of one batch, behind SlotCache's `update`: steps lie side by side."""

    def __init__(self) -> None:
        self._parts: tuple[list[Tensor], list[Tensor]] = ([], [])

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        for parts, new in zip(self._parts, (keys, values)):
            parts.append(new)
        return torch.cat(self._parts[0], dim=2), torch.cat(self._parts[1], dim=2)


def write_texts(
    target: Any,
    prompts: list[list[int]],
    samples: int,
    budget: int,
    eos: frozenset[int],
    sequences: int = 8,
) -> list[list[int]]:
    """Prompts with the target's own answers, as ids; so many `sequences` run at once."""
    requests = [
        Request(tuple(prompt), budget, sampling=Sampling(0.8) if number else GREEDY, seed=number)
        for prompt in prompts
        for number in range(samples)
    ]
    longest = max(len(prompt) for prompt in prompts) + budget
    runner = ModelRunner(target, min(sequences, len(requests)), longest)
    engine = Engine(runner, NoDrafter(), ExactRule(Settings()), spd_k=0, eos_ids=eos, decode=str)
    return [[*record.request.prompt, *record.tokens] for record in engine.run(requests)]


def draft_vocabulary(texts: list[list[int]], size: int, most: int) -> Tensor:
    """The `size` most frequent ids in rising order, filled up from 0; all `most` if size is 0."""
    if not size:
        return torch.arange(most)
    counts = Counter(token for text in texts for token in text)
    ordered = [token for token, _ in counts.most_common(size)]
    ordered += [token for token in range(size) if token not in counts][: size - len(ordered)]
    return torch.tensor(sorted(ordered))


def last_weights(target: Any) -> dict[str, Tensor]:
    """The target's last layer, norm and output embeddings, before it is packed: names as in a
    decoder layer, `norm.weight` and `lm_head.weight`."""
    decoder = target.get_decoder()
    named = dict(decoder.layers[-1].named_parameters())
    named["norm.weight"] = decoder.norm.weight
    named["lm_head.weight"] = target.get_output_embeddings().weight
    return {name: parameter.detach().float() for name, parameter in named.items()}


def fresh(
    target: Any, last: dict[str, Tensor], layers: tuple[int, ...], drafted_D: Tensor
) -> tuple[dict[str, Any], Eagle3Head]:
    """(config.json, the head before training): the target's `last_weights` over the last of the
    features, and noise for what the target has not: other features, the next token's embedding."""
    shape = target.config.get_text_config()
    rope = getattr(shape, "rope_parameters", None) or {"rope_theta": shape.rope_theta}
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(drafted_D),
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "head_dim": size,
            "rope_theta": rope["rope_theta"],
            **{
                key: getattr(shape, key)
                for key in (
                    "hidden_size", "intermediate_size", "num_attention_heads",
                    "num_key_value_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings",
                )
            },
        },
    }  # fmt: skip
    hidden = shape.hidden_size

    def noise(rows: int, columns: int) -> Tensor:
        return 0.02 * torch.randn(rows, columns)

    tensors = {
        "fc.weight": torch.cat([noise(hidden, (len(layers) - 1) * hidden), torch.eye(hidden)], 1),
        "norm.weight": last["norm.weight"],
        "lm_head.weight": last["lm_head.weight"][drafted_D],
        "layers.0.input_layernorm.weight": torch.ones(hidden),
        "layers.0.hidden_norm.weight": last["input_layernorm.weight"],
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        own = last[f"self_attn.{name}.weight"]
        tensors[f"layers.0.self_attn.{name}.weight"] = torch.cat([noise(*own.shape), own], 1)
    same = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    for name in (*same, "post_attention_layernorm"):
        tensors[f"layers.0.{name}.weight"] = last[f"{name}.weight"]
    tensors["d2t"] = drafted_D - torch.arange(len(drafted_D))
    head = Eagle3Head.from_checkpoint(
        Checkpoint("a new head", config, tensors), TargetShape.of(target.config), None
    )
    return config, head


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target says of one text: computed once, as its pass costs more than the head's.

    ids_N; features_NF: of the layers that the head reads; labels_ND: log-probabilities over the
    draft ids; counts_N: whether the target's choice of the next token can be drafted.
    """

    ids_N: Tensor
    features_NF: Tensor
    labels_ND: Tensor
    counts_N: Tensor


class Trainer:
    """A head, its target, and what one training step is. width: tokens of a text that are used."""

    def __init__(self, target: Any, head: Eagle3Head, steps: int, width: int) -> None:
        self.head, self._steps, self._width = head, steps, width
        self._runner = ModelRunner(target, 1, width, reuse_prefixes=False)
        self._embed = target.get_input_embeddings()
        self._drafted_D = head.vocabulary.to_target_D
        self._lessons: dict[tuple[int, ...], Lesson] = {}

    def lesson(self, text: list[int]) -> Lesson:
        """Of the text's first `width` tokens."""
        text = text[: self._width]
        if (kept := self._lessons.get(tuple(text))) is None:
            kept = self._lessons[tuple(text)] = self._read(text)
        return kept

    @torch.no_grad()
    def _read(self, text: list[int]) -> Lesson:
        self._runner.resize(1)
        self._runner.hidden_layers = self.head.layers_read
        logits_NV = self._runner.extend([text])[0]
        features_1NF = self._runner.take_hidden()
        assert features_1NF is not None
        labels_ND = logits_NV[:, self._drafted_D].float().log_softmax(dim=-1).half()
        counts_N = torch.isin(logits_NV.argmax(dim=-1), self._drafted_D)
        # out of inference mode: what is trained on must be a plain tensor
        return Lesson(torch.tensor(text), features_1NF[0].clone(), labels_ND.clone(), counts_N)

    @torch.no_grad()
    def seen(self, texts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(embeddings [B, N, H], features [B, N, F], labels [B, N, D], which positions count
        [B, N]) of the texts' lessons, padded."""
        lessons = [self.lesson(text) for text in texts]

        def batch(parts: list[Tensor]) -> Tensor:
            return pad_sequence(parts, batch_first=True)

        return (
            self._embed(batch([lesson.ids_N for lesson in lessons])).float(),
            batch([lesson.features_NF for lesson in lessons]).float(),
            batch([lesson.labels_ND for lesson in lessons]).float(),
            batch([lesson.counts_N for lesson in lessons]),
        )

    def play(self, texts: list[list[int]]) -> tuple[Tensor, list[tuple[int, int]]]:
        """(loss, by step (tokens at which the head's choice is the target's, all tokens))."""
        embedded_BNH, features_BNF, labels_BND, counts_BN = self.seen(texts)
        states = self.head.project(features_BNF[:, :-1])
        pairs = states.shape[1]
        positions = torch.arange(pairs)[None]
        causal = causal_mask(positions, pairs, torch.float32)
        diagonal = torch.full((pairs, pairs), torch.finfo(torch.float32).min).fill_diagonal_(0)
        mask, cache = causal, StepCache()
        loss, agreed = torch.zeros(()), []
        for step in range(self._steps):

            def ahead(x: Tensor, by: int = 1 + step) -> Tensor:  # of token i + by, at pair i
                return x.roll(-by, dims=1)[:, :pairs]

            counts = ahead(counts_BN) & (positions < pairs - step)
            hidden = self.head(
                ahead(embedded_BNH),
                states,
                positions + step,
                mask.expand(len(texts), -1, -1, -1),
                cache,
            )
            logits, states = self.head.predict(hidden)
            labels = ahead(labels_BND)[counts]
            found = logits[counts].log_softmax(dim=-1)
            loss = loss + DECAY**step * -(labels.exp() * found).sum(dim=-1).mean()
            same = found.argmax(dim=-1) == labels.argmax(dim=-1)
            agreed.append((int(same.sum()), len(same)))
            mask = torch.cat([mask, diagonal[None, None]], dim=-1)
        return loss, agreed


def train(
    trainer: Trainer,
    texts: list[list[int]],
    rate: float,
    batch: int,
    seconds: float,
    most: int,
    low_precision: bool = False,
) -> Iterator[tuple[int, float, list[float]]]:
    """Train until the time or `most` updates are over; yields (update, loss of the training texts
    since the last report, agreement by step on the held-out texts) now and then. low_precision:
    products in bfloat16."""
    texts = [text for text in texts if len(text) > trainer._steps + 2]
    order = random.Random(0)
    order.shuffle(texts)
    held = texts[: max(1, len(texts) // 10)]
    rest = texts[len(held) :]
    head = trainer.head.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.0)
    start, losses = time.monotonic(), list[float]()
    for update in range(1, most + 1):
        done = max(update / most, (time.monotonic() - start) / seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, update / 20) * max(0.02, 1 - done)
        with torch.autocast("cpu", torch.bfloat16, enabled=low_precision):
            loss, _ = trainer.play(order.sample(rest, min(batch, len(rest))))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if update % 50 == 0 or done >= 1:
            with torch.no_grad():
                _, agreed = trainer.play(held[:batch])
            shares = [same / max(1, count) for same, count in agreed]
            yield update, sum(losses) / len(losses), shares
            losses.clear()
        if done >= 1:
            break
    head.eval().requires_grad_(False)


def save(head: Eagle3Head, config: dict[str, Any], target: str, steps: int, folder: Path) -> None:
    """The head in speculators' format, bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    drafted_D = head.vocabulary.to_target_D
    tensors = {
        re.sub(r"^layer\.", "layers.0.", name): tensor.bfloat16().contiguous()
        for name, tensor in head.state_dict().items()
    }
    tensors["d2t"] = drafted_D - torch.arange(len(drafted_D))
    tensors["t2d"] = torch.zeros(len(head.vocabulary.to_draft_V), dtype=torch.bool)
    tensors["t2d"][drafted_D] = True
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    speculators = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
        "verifier": {"name_or_path": target, "architectures": []},
    }
    whole = {**config, "dtype": "bfloat16", "speculators_config": speculators}
    (folder / "config.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def read_questions(path: Path, key: str) -> list[str]:
    """A key of the rows of a .jsonl or .jsonl.gz."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line)[key] for line in lines if line.strip()]


def functions_to_complete(count: int) -> list[str]:
    """Questions that give the head and docstring of so many functions of the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            continue
        try:
            code = path.read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(code)))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in nodes:
            if not isinstance(node, ast.FunctionDef) or len(ast.get_docstring(node) or "") < 40:
                continue
            if len(node.body) < 4 or node.body[0].end_lineno - node.lineno > 15:  # type: ignore[operator]
                continue
            lines = code.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
            found.append(textwrap.dedent("\n".join(lines)))
    chosen = random.Random(0).sample(sorted(set(found)), count)
    return [f"Complete this function:\n```python\n{head}\n```" for head in chosen]


def chat_prompts(questions: list[str], tokenizer: Any) -> list[list[int]]:
    """Ids of chats in which a user asks these."""
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
        for question in questions
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder, hub id or pair:NAME/target")
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl or .jsonl.gz")
    parser.add_argument("--key", default="question", help="of a row's prompt")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--functions", type=int, default=0, help="of Python's library to complete")
    parser.add_argument("--samples", type=int, default=1, help="answers per prompt")
    parser.add_argument("--sequences", type=int, default=8, help="that are written at once")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--draft-vocabulary", type=int, default=16384, help="0: the whole")
    parser.add_argument("--width", type=int, default=384, help="tokens of a text")
    parser.add_argument("--steps", type=int, default=4, help="of drafting that are learnt")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=4e-4)
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--updates", type=int, default=10**6, help="at most")
    args = parser.parse_args()
    torch.manual_seed(0)
    path = as_folder(resolve_source(args.target, "--target"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    target: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    layers = usual_layers(TargetShape.of(target.config))
    kept = args.output / "texts.json"
    last = last_weights(target)
    weights.pack(target, None, ExecutionSettings())
    if not kept.exists():
        args.output.mkdir(parents=True, exist_ok=True)
        questions = read_questions(args.prompts, args.key) + functions_to_complete(args.functions)
        prompts = chat_prompts(questions, tokenizer)
        eos = eos_token_ids(target, tokenizer)
        texts = write_texts(target, prompts, args.samples, args.max_new_tokens, eos, args.sequences)
        kept.write_text(json.dumps(texts))
    texts = json.loads(kept.read_text())
    print(f"{len(texts)} texts of {sum(map(len, texts))} tokens")
    drafted_D = draft_vocabulary(texts, args.draft_vocabulary, target.config.vocab_size)
    config, head = fresh(target, last, layers, drafted_D)
    trainer = Trainer(target, head, args.steps, args.width)
    for update, loss, shares in train(
        trainer,
        texts,
        args.rate,
        args.batch,
        60 * args.minutes,
        args.updates,
        torch.cpu._is_avx512_bf16_supported(),
    ):
        print(
            f"{update}: loss {loss:.3f}, agreement {' '.join(f'{s:.3f}' for s in shares)}",
            flush=True,
        )
        save(head, config, args.target, args.steps, args.output)


if __name__ == "__main__":
    main()
