"""Both models of a pair in GGUF files, through FlyLM."""

import pytest
import torch

from fly.errors import FlyError
from fly.execution import kernels, packed_linear
from fly.harness.hf import FlyLM
from fly.models import gguf
from tests import tiny
from tests.gguf_files import load_by_transformers, write_gguf
from tests.integration.test_lm import instances

PROMPTS = ["hi12", "1", "hihi2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "target.gguf", "llama")
    write_gguf(folder / "draft.gguf", "llama", layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLY_HOME", str(folder / "home"))
        for role in ("target", "draft"):
            gguf.export(folder / f"{role}.gguf", folder / role)
        yield folder


def texts(files, suffix, **options):
    lm = FlyLM(
        pretrained=str(files / f"draft{suffix}"),
        target_model_path=str(files / f"target{suffix}"),
        device="cpu", win_len=1, spd_k=4, draft_policy="fixed", entropy_thre=0.1, **options,
    )  # fmt: skip
    made = lm.generate_until(instances({"max_gen_toks": 30}, PROMPTS))
    return made, lm


@pytest.mark.skipif(kernels.why_not() is not None, reason="no kernels here")
@pytest.mark.parametrize(
    ("options", "is_unpacked"),
    [
        ({}, False),
        ({}, True),
        tiny.slow({"use_sd": False}, False),
        tiny.slow({"draft_quantization": "none"}, False),
    ],
)
def test_texts_are_those_of_the_exported_bfloat16_models(files, options, is_unpacked, monkeypatch):
    """Whether weights are unpacked is timed, and these are too small to say the same each time."""
    monkeypatch.setattr(packed_linear, "_is_faster_unpacked", lambda model: is_unpacked)
    ours, lm = texts(files, ".gguf", **options)
    theirs, exported = texts(files, "", **options)
    assert ours == theirs
    assert lm.pair.packed.target.endswith(" gguf") is not is_unpacked
    assert not exported.pair.packed.target.endswith(" gguf")
    assert lm.eos_ids == exported.eos_ids == {7, 5}


def test_eager_passes_dequantise(files):
    ours, lm = texts(files, ".gguf", execution="eager")
    assert lm.pair.packed.target == "eager"
    assert ours == texts(files, "", execution="eager")[0]
    _, exact = texts(files, ".gguf", dtype="float32")
    weights = load_by_transformers(files / "target.gguf", torch.float32).state_dict()
    assert torch.equal(exact.model.lm_head.weight, weights["lm_head.weight"])


def test_a_file_that_is_cut_short_is_refused_in_one_line(files, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((files / "target.gguf").read_bytes()[:-4096])
    with pytest.raises(FlyError, match=r"cut\.gguf: cannot be loaded: .*fetch it again"):
        FlyLM(target_model_path=str(cut), use_sd=False, device="cpu")
