"""Convert a GGUF file of the Qwen2 family to a folder that transformers loads without gguf.

The same GGUF gives the same bytes whichever transformers is installed. transformers' own GGUF
loader is not used, because what it saves depends on its version: 4.57 ends a turn at
<|endoftext|> and keeps 3 special tokens; 5.x drops the NFC normaliser, keeps rope_theta where 4.57
does not look, and peaks at three times the memory. The weights are bit-identical to its own.

The files keep the official layout: tokenizer_config.json in the form of the original repository,
which every supported transformers reads. The output matrix stays its own tensor
(tie_word_embeddings false): the GGUF quantises it at 8 bits and the input embedding at fewer.
"""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

from fly.errors import FlyError

# GGUF's "blk.N." + key is transformers' "model.layers.N." + value, both with .weight or .bias.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Qwen2's split (the GGUF's "qwen2" pre-tokeniser): digits one by one, clitics in either case.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # GGUF token types; the others pad the matrix
_TURN_END, _TEXT_END = "<|im_end|>", "<|endoftext|>"


def gguf_to_safetensors(gguf: Path, folder: Path, eos_token_ids: tuple[int, ...]) -> None:
    """Create `folder` with the weights (bfloat16), configs and tokenizer of `gguf`.

    Generation ends at any of `eos_token_ids`. Peak memory is about the size of the bfloat16
    weights plus one float32 matrix. Raises FlyError if the file is no Qwen2 model, OSError if
    the disk fills up.
    """
    from gguf import GGUFReader

    folder.mkdir(parents=True)
    reader = GGUFReader(gguf)
    architecture = _value(reader, "general.architecture")
    if architecture != "qwen2":
        raise FlyError(f"{gguf}: architecture {architecture!r}: only 'qwen2' can be converted")
    tokens = _value(reader, "tokenizer.ggml.tokens")
    _write_tokenizer(reader, tokens, folder)
    _write_configs(reader, tokens, folder, eos_token_ids)
    _write_weights(reader, folder)


def _value(reader: Any, key: str) -> Any:
    """The metadata at `key`: text, a plain number, or a list of either."""
    from gguf import GGUFValueType

    field = reader.get_field(key)
    if field is None:
        raise FlyError(f"GGUF file has no {key}: it is not a Qwen2 model that fly can convert")
    is_text = field.types[-1] == GGUFValueType.STRING
    parts = (field.parts[index] for index in field.data)
    values = [bytes(part).decode() if is_text else part[0].item() for part in parts]
    return values if field.types[0] == GGUFValueType.ARRAY else values[0]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_configs(
    reader: Any, tokens: list[str], folder: Path, eos_token_ids: tuple[int, ...]
) -> None:
    theta = _value(reader, "qwen2.rope.freq_base")
    text_end = tokens.index(_TEXT_END)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": text_end,
        "dtype": "bfloat16",
        "eos_token_id": tokens.index(_TURN_END),
        "hidden_act": "silu",
        "hidden_size": _value(reader, "qwen2.embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": _value(reader, "qwen2.feed_forward_length"),
        "max_position_embeddings": _value(reader, "qwen2.context_length"),
        "num_attention_heads": _value(reader, "qwen2.attention.head_count"),
        "num_hidden_layers": _value(reader, "qwen2.block_count"),
        "num_key_value_heads": _value(reader, "qwen2.attention.head_count_kv"),
        # float32 in the file; rounded to the 1e-6 of the original config
        "rms_norm_eps": float(f"{_value(reader, 'qwen2.attention.layer_norm_rms_epsilon'):.6g}"),
        # transformers 5 reads the second; 4.57 only the first, and falls back silently without it
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "sliding_window": None,
        "tie_word_embeddings": not any(t.name == "output.weight" for t in reader.tensors),
        # without it, 4.57.6 and 5.17 warn that the tokenizer is a broken Mistral one
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": len(tokens),
    }
    _write_json(folder / "config.json", config)
    # no sampling defaults: greedy decoding would warn about them
    generation = {
        "bos_token_id": text_end,
        "eos_token_id": list(eos_token_ids),
        "pad_token_id": text_end,
    }
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(reader: Any, tokens: list[str], folder: Path) -> None:
    types = _value(reader, "tokenizer.ggml.token_type")
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for i, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    vocab = {t: i for i, t in enumerate(tokens) if types[i] == _NORMAL}
    # The tokenizers library numbers added tokens after the others, whatever their "id" says.
    if [*vocab.values(), *(t["id"] for t in added)] != list(range(len(vocab) + len(added))):
        raise FlyError("GGUF tokenizer: special tokens must follow the others, without gaps")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": _QWEN2_SPLIT},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {**byte_level, "use_regex": False},
            ],
        },
        "post_processor": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": _value(reader, "tokenizer.ggml.merges"),
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added
        },
        "bos_token": None,
        "chat_template": _value(reader, "tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "eos_token": _TURN_END,
        "errors": "replace",
        "model_max_length": _value(reader, "qwen2.context_length"),
        "pad_token": _TEXT_END,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _tensor_name(name: str) -> str:
    """`blk.0.attn_q.bias` -> `model.layers.0.self_attn.q_proj.bias`."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _write_weights(reader: Any, folder: Path) -> None:
    import numpy as np
    import torch
    from gguf import dequantize
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    weights = {}
    for tensor in reader.tensors:
        # float32 tensors are views of the read-only file; "W" copies those, which are small
        dense = torch.from_numpy(np.require(dequantize(tensor.data, tensor.tensor_type), None, "W"))
        weights[_tensor_name(tensor.name)] = dense.to(torch.bfloat16)
    path = folder / "model.safetensors"
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(_errno_in(str(error)), str(error)) from error
    with safe_open(path, "pt") as written:  # refuses a file shorter than its header says
        if set(written.keys()) != set(weights):
            raise OSError(errno.EIO, f"{path} lacks some of the tensors written to it")


def _errno_in(text: str) -> int:
    """safetensors is written in Rust and gives the system's error number only in its text."""
    found = re.search(r"os error (\d+)", text)
    return int(found[1]) if found else errno.EIO
