"""Tiny models in GGUF files: random weights of any format, and a tokenizer of a few tokens."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from fly.execution.kernels import gguf as kernels

TOKENS = ["h", "i", "hi", "1", "2", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[PAD8]"]
TYPES = [1, 1, 1, 1, 1, 3, 3, 3, 5]  # normal, control, unused
EOS = (7, 5)
WIDTH, HEADS, KV_HEADS, HIDDEN = 256, 2, 1, 512  # heads of 128: transformers takes that for granted

_Q = gguf.GGMLQuantizationType


def write_gguf(
    path: Path,
    architecture: str = "qwen2",
    *,
    formats: tuple[str, ...] = ("Q4_K", "Q6_K"),
    layers: int = 2,
    vocabulary: int = 64,
    is_tied: bool = False,
    name: str = "tiny",
    without: str = "",
) -> None:
    """Matrices take the formats in turn. without: a tensor that the file lacks."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_value_length(WIDTH // HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    more = vocabulary - len(TOKENS)
    writer.add_token_list([*TOKENS, *(f"[PAD{9 + index}]" for index in range(more))])
    writer.add_token_types([*TYPES, *[5] * more])
    writer.add_token_merges(["h i"])
    writer.add_eos_token_id(EOS[0])
    writer.add_bos_token_id(EOS[1])
    writer.add_pad_token_id(EOS[1])
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    generator = np.random.default_rng(0)
    shapes = _shapes(architecture, layers, vocabulary, is_tied)
    for number, (tensor, shape) in enumerate(shapes.items()):
        if tensor == without:
            continue
        form = formats[number % len(formats)]
        if len(shape) == 1:
            values = generator.standard_normal(shape).astype(np.float32)
            writer.add_tensor(tensor, 1 + values / 8 if "norm" in tensor else values / 8)
        elif form == "F16":
            values = generator.standard_normal(shape) / 16
            writer.add_tensor(tensor, values.astype(np.float16))
        else:
            blocks = kernels.random_blocks(form, *shape)
            # of every tensor its own, but all by the same generator
            blocks = blocks.roll(number, 0).numpy()
            writer.add_tensor(tensor, blocks, raw_dtype=_Q[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(
    architecture: str, layers: int, vocabulary: int, is_tied: bool
) -> dict[str, tuple[int, ...]]:
    keys = WIDTH // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, WIDTH)}
    if not is_tied:
        shapes["output.weight"] = (vocabulary, WIDTH)
    shapes["output_norm.weight"] = (WIDTH,)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,),
        "attn_output.weight": (WIDTH, WIDTH), "ffn_down.weight": (WIDTH, HIDDEN),
    }  # fmt: skip
    if architecture == "phi3":
        layer |= {
            "attn_qkv.weight": (WIDTH + 2 * keys, WIDTH),
            "ffn_up.weight": (2 * HIDDEN, WIDTH),
        }
    else:
        sizes = {"attn_q": WIDTH, "attn_k": keys, "attn_v": keys}
        layer |= {f"{part}.weight": (size, WIDTH) for part, size in sizes.items()}
        layer |= {"ffn_gate.weight": (HIDDEN, WIDTH), "ffn_up.weight": (HIDDEN, WIDTH)}
        if architecture == "qwen2":
            layer |= {f"{part}.bias": (size,) for part, size in sizes.items()}
        if architecture == "qwen3":
            layer |= {f"attn_{x}_norm.weight": (WIDTH // HEADS,) for x in "qk"}
    for index in range(layers):
        shapes |= {f"blk.{index}.{part}": shape for part, shape in layer.items()}
    return shapes


def load_by_transformers(path: Path, dtype: torch.dtype = torch.bfloat16):
    """The reference: every weight dequantised."""
    import transformers

    options = {}
    if hasattr(transformers, "GgufConfig"):  # transformers 5 may otherwise leave them quantised
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, **options
    ).eval()
