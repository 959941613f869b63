"""Models in GGUF files: the weights that stay in the file are those that transformers loads."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import gguf as package
import pytest
import torch
import transformers

from fly.errors import FlyError
from fly.execution import kernels, packed_linear
from fly.execution.kernels import gguf as kernels_gguf
from fly.models import gguf, tokenizers
from tests.gguf_files import EOS, load_by_transformers, write_gguf
from tests.unit.test_kernels import isa  # noqa: F401  (a fixture)

needs_kernels = pytest.mark.skipif(kernels.why_not() is not None, reason=str(kernels.why_not()))
IDS = torch.tensor([[0, 1, 2, 3, 63, 4, 2]])


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_HOME", str(tmp_path / "home"))


def load(file: Path, keep=kernels_gguf.takes) -> transformers.PreTrainedModel:
    return gguf.load(file, transformers.AutoModelForCausalLM, keep)


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    packed_linear.use_kernels(model, kernels.Bfloat16Linear)
    with torch.inference_mode():
        return model(IDS).logits


ARCHITECTURES = [
    ("llama", {}),
    ("llama", {"is_tied": True}),
    ("llama", {"name": "Mistral 7B Instruct"}),
    ("qwen2", {}),
    ("qwen2", {"formats": ("Q8_0", "Q4_0", "F16")}),
    ("qwen3", {"formats": ("Q5_K",)}),
    ("phi3", {}),
]


@needs_kernels
@pytest.mark.parametrize(("architecture", "options"), ARCHITECTURES)
def test_weights_kept_in_the_file_are_those_of_transformers(tmp_path, architecture, options):
    file = tmp_path / "m.gguf"
    write_gguf(file, architecture, **options)
    expected = load_by_transformers(file)
    ours = load(file)
    kept = [m for m in ours.modules() if hasattr(m, "gguf_weight")]
    assert len(kept) > len(options.get("formats", ())) * 2
    assert all(m.weight.isnan().all() for m in kept), "a use of the placeholder is seen"
    assert ours.num_parameters() == expected.num_parameters()
    assert (ours.dtype, ours.device.type) == (torch.bfloat16, "cpu")

    restored = load(file)
    packed_linear.restore_weights(restored)
    weights = restored.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert torch.equal(weights[name], weight), name

    assert torch.equal(logits(ours), logits(expected))


@pytest.mark.parametrize("is_slow", [False, True])
def test_weights_are_unpacked_where_that_is_faster(isa, tmp_path, monkeypatch, is_slow):  # noqa: F811
    """By time, and never for tiles; the logits are the same bits."""
    file = tmp_path / "m.gguf"
    write_gguf(file)
    own = kernels_gguf.GgufProduct.forward

    def forward(self, x):
        time.sleep(0.005 * (self.is_unpacked is not is_slow))
        return own(self, x)

    kept, timed = load(file), load(file)
    with monkeypatch.context() as untimed:
        untimed.setattr(packed_linear, "_is_faster_unpacked", lambda model: False)
        assert packed_linear.use_kernels(kept, kernels.Bfloat16Linear)
    monkeypatch.setattr(kernels, "instructions", lambda: isa)
    monkeypatch.setattr(kernels_gguf.GgufProduct, "forward", forward)
    reads_file = packed_linear.use_kernels(timed, kernels.Bfloat16Linear)
    assert reads_file is (isa == "amx" or not is_slow)
    assert torch.equal(kept(IDS).logits, timed(IDS).logits)

    is_slow = not is_slow  # the other way round now, but what was timed is kept
    assert packed_linear.use_kernels(load(file), kernels.Bfloat16Linear) is reads_file


@needs_kernels
def test_products_read_the_file_and_int8_drafts_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_linear, "_is_faster_unpacked", lambda model: False)  # timed else
    file = tmp_path / "m.gguf"
    write_gguf(file)
    model = load(file)
    assert packed_linear.use_kernels(model, kernels.Bfloat16Linear)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp.gate_proj.product, kernels_gguf.GgufProduct)
    assert mlp.gate_proj.product is mlp.up_proj.product
    draft = load(file)
    assert not packed_linear.use_kernels(draft, kernels.Int8Linear)
    assert isinstance(draft.lm_head, kernels.Int8Linear)


@needs_kernels
def test_a_loader_that_leaves_rows_where_they_lie_is_caught(tmp_path, monkeypatch):
    """The mutant: Llama's query and key rows are permuted in GGUF files."""
    file = tmp_path / "m.gguf"
    write_gguf(file, "llama")

    def keep_as_they_lie(tensor, process):
        rows, width = tensor.shape
        return gguf.GgufWeight(width, rows, tensor.format, tensor.read_rows())

    monkeypatch.setattr(gguf, "_keep_quantised", keep_as_they_lie)
    assert not torch.equal(logits(load(file)), logits(load_by_transformers(file)))


def test_without_kernels_all_is_dequantised_as_by_transformers(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf(file, "llama", is_tied=True)
    ours, theirs = load(file, keep=lambda weight: False), load_by_transformers(file)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name


def test_names_are_mapped_once(tmp_path, monkeypatch):
    """transformers asks for the map again in every module: it took half of a load."""
    import gguf as package

    file, made = tmp_path / "m.gguf", []
    write_gguf(file, "llama")
    honest = package.get_tensor_name_map
    monkeypatch.setattr(package, "get_tensor_name_map", lambda *of: made.append(of) or honest(*of))
    load(file)
    assert len(made) == 1


def test_metadata_is_written_once_and_ends_are_all_that_the_file_knows(tmp_path, monkeypatch):
    file, read = tmp_path / "m.gguf", []

    class Counted(package.GGUFReader):
        def __init__(self, path):
            read.append(path)
            super().__init__(path)

    write_gguf(file)
    with monkeypatch.context() as patch:
        patch.setattr(package, "GGUFReader", Counted)
        folder = gguf.metadata_folder(file)
    assert read == [file], "a large vocabulary takes seconds each time"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("hi<|im_end|>12")["input_ids"] == [2, 7, 3, 4]
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi<|im_end|>"

    class Model:
        generation_config = transformers.GenerationConfig.from_pretrained(folder)

    assert tokenizers.eos_token_ids(Model, tokenizer) == set(EOS)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)
    assert gguf.metadata_folder(file) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing half-written"


def test_a_file_that_changed_is_read_again(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf(file)
    before = gguf.metadata_folder(file)
    write_gguf(file, "llama")
    after = gguf.metadata_folder(file)
    assert after != before
    assert transformers.AutoConfig.from_pretrained(after).model_type == "llama"


def test_a_home_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    write_gguf(file)
    (tmp_path / "home").write_text("a file")
    with pytest.raises(FlyError, match=r"FLY_HOME=.*cannot be written"):
        gguf.metadata_folder(file)


def test_missing_and_unknown_tensors_are_named(tmp_path, caplog):
    file = tmp_path / "m.gguf"
    write_gguf(file, without="blk.1.ffn_up.weight")
    with pytest.raises(FlyError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(file)
    other = tmp_path / "other.gguf"
    write_gguf(other, "qwen2")
    data = other.read_bytes().replace(b"blk.1.attn_q.bias", b"blk.1.attn_x.bias")
    other.write_bytes(data)
    caplog.set_level(logging.WARNING)
    with pytest.raises(FlyError, match=r"lacks model\.layers\.1\.self_attn\.q_proj\.bias"):
        load(other)
    assert "not used: blk.1.attn_x.bias" in caplog.text


def test_export_is_a_folder_that_transformers_loads(tmp_path):
    file, folder = tmp_path / "m.gguf", tmp_path / "exported"
    write_gguf(file, "llama", is_tied=True)
    gguf.export(file, folder)
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = load_by_transformers(file)
    assert ours.dtype == torch.bfloat16
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    assert set(ours.generation_config.eos_token_id) == set(EOS)
    assert transformers.AutoTokenizer.from_pretrained(folder)("hi")["input_ids"] == [2]


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    file, folder = tmp_path / "m.gguf", tmp_path / "exported"
    write_gguf(file)

    def full(model, to):
        (Path(to) / "half").write_text("half")
        raise OSError("the disk is full")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(OSError, match="full"):
        gguf.export(file, folder)
    assert not [path for path in tmp_path.iterdir() if "exported" in path.name]
