"""The Triton kernels between a layer's products, by Triton's interpreter and its compilers."""

import pytest

from tests.triton import needs_triton, run

pytestmark = needs_triton

EXAMPLE = """
    import contextlib
    import torch
    from fly.execution.triton_layer import TritonKernels

    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
    HEADS, KV_HEADS, SIZE, CAPACITY = 6, 2, 48, 512

    def rotated(x, cos, sin):
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos[:, None] + turned * sin[:, None]

    def compute(starts, width, first_slot, on_device):
        \"\"\"A layer's rotation and attention: (what the kernels found, what they should).\"\"\"
        torch.manual_seed(0)
        key, value = torch.full((2, 5, KV_HEADS, CAPACITY, SIZE), torch.nan)
        slots = range(first_slot, first_slot + len(starts))
        for slot, start in zip(slots, starts):
            key[slot, :, :start], value[slot, :, :start] = torch.randn(2, KV_HEADS, start, SIZE)
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        x = torch.randn(len(starts), width, (HEADS + 2 * KV_HEADS) * SIZE)
        angles = torch.randn(len(starts), width, SIZE // 2).repeat(1, 1, 2)
        angles = angles.cos(), angles.sin()
        parts = x.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], -1)
        parts = [part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts]
        queries, keys, values = *(rotated(part, *angles) for part in parts[:2]), parts[2]

        where = torch.tensor([first_slot]) if on_device else first_slot
        cached, run = (key, value), TritonKernels()
        query = run.rotate(x, angles, cached, positions, where, HEADS)
        mixed = run.attention(query, cached, positions, where, 0.2, CAPACITY)
        expected = torch.empty_like(mixed)
        for row, slot in enumerate(slots):
            for index, last in enumerate(positions[row]):
                seen = (part[slot, :, : last + 1].repeat_interleave(3, 0) for part in cached)
                seen_keys, seen_values = seen
                scores = (seen_keys @ queries[row, :, index, :, None])[..., 0] * 0.2
                expected[row, index] = (scores.softmax(-1)[:, None] @ seen_values)[:, 0]
        written = [
            part[slot][:, positions[row]]
            for part in cached for row, slot in enumerate(slots)
        ]
        return [query, *written, mixed], [queries, *keys, *values, expected]
"""

PLACES = [([300], 1, 2, False), ([300, 7], 9, 1, False), ([0, 130, 60], 33, 0, False),
          ([90], 128, 3, True)]  # fmt: skip


@pytest.mark.parametrize(("starts", "width", "first_slot", "on_device"), PLACES)
def test_rotation_and_attention(starts, width, first_slot, on_device):
    """Ragged sequences over several parts of the keys; a prompt, wherever its slot is said."""
    run(
        f"""{EXAMPLE}
    for found, expected in zip(*compute({starts}, {width}, {first_slot}, {on_device})):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    """,
        TRITON_INTERPRET="1",
    )


def test_a_part_that_is_left_out_is_noticed():
    """The mutant: the queries' last part of the keys is not added."""
    run(
        f"""{EXAMPLE}
    from fly.execution import triton_layer

    honest = triton_layer.combine

    class Combine:
        def __getitem__(self, grid):
            def call(mixed, highest, *rest, **options):
                highest[..., 2] = -torch.inf
                return honest[grid](mixed, highest, *rest, **options)
            return call

    triton_layer.combine = Combine()
    found, expected = compute([300], 1, 2, False)
    assert (found[-1] - expected[-1]).abs().max() > 1e-2
    """,
        TRITON_INTERPRET="1",
    )


def test_norms_and_gates():
    run(
        f"""{EXAMPLE}
    run, weight = TritonKernels(), torch.rand(96)
    x, delta = torch.randn(2, 3, 5, 96)
    for added in (None, delta):
        total, normed = run.norm(x, weight, 1e-6, added)
        expected = x if added is None else x + added
        torch.testing.assert_close(total, expected)
        rms = torch.nn.functional.rms_norm(expected, (96,), weight, 1e-6)
        torch.testing.assert_close(normed, rms)
    gate, up = torch.randn(2, 3, 5, 2600)
    gated = run.gated(torch.cat([gate, up], -1))
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up)
    """,
        TRITON_INTERPRET="1",
    )


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_they_compile_for_gpus_and_fit_on_them(kind):
    """NVIDIA's A100 and H100 and AMD's MI300, with the hints of a launch, by which loads are
    pipelined and take more of a multiprocessor's memory."""
    script = f"""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from fly.execution import triton_layer

    def compile(kernel, slot, **constants):
        types = {{name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}}
        tensors = "x delta total output query key value cos sin"
        types |= {{name: "*{kind}" for name in tensors.split() if name in types}}
        kept = "weight mixed highest whole"
        types |= {{name: "*fp32" for name in kept.split() if name in types}}
        types |= {{name: "fp32" for name in ("eps", "scaling") if name in types}}
        types |= {{name: "*i64" for name in ("positions",) if name in types}}
        types |= {{name: slot for name in ("first_slot",) if name in types}}
        places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
        hinted = [n for n, kind in types.items() if kind[0] == "*" or n.startswith("stride")]
        hints = {{(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in hinted}}
        for target, most in (
            (GPUTarget("cuda", 80, 32), 163 << 10),
            (GPUTarget("cuda", 90, 32), 227 << 10),
            (GPUTarget("hip", "gfx942", 64), 64 << 10),
        ):
            # AMD's compiler in Triton 3.9 fails with them for float16
            given = hints if target.backend == "cuda" else {{}}
            source = ASTSource(fn=kernel, signature=types, constexprs=places, attrs=given)
            shared = triton.compile(source, target=target).metadata.shared
            assert shared <= most, (kernel, constants, target, shared)
            print(shared)

    keys = triton_layer.KEYS_OF[4 if "{kind}" == "fp32" else 2]
    compile(triton_layer.add_and_norm, "i32", WIDTH=896, WIDTH_2=1024, ADDS=True)
    compile(triton_layer.gate, "i32", WIDTH=4864, COLUMNS=1024)
    for slot in ("i32", "*i64"):
        loads = slot == "*i64"
        compile(
            triton_layer.rotate_and_store, slot,
            HEADS=12, KV_HEADS=2, SIZE=128, HALF_2=64, LOADS=loads,
        )
        for size in (64, 80, 128):
            power = triton.next_power_of_2(size)
            compile(
                triton_layer.attend, slot,
                GROUP=6, ROWS=triton_layer._MOST_ROWS, SIZE=size, SIZE_2=power, KEYS=keys,
                LOADS=loads,
            )
    compile(triton_layer.combine, "i32", HEADS=12, SIZE=128, SIZE_2=128, PARTS_2=32)
    """
    assert len(run(script, TRITON_INTERPRET="0").splitlines()) == 3 * (2 + 2 * 4 + 1)
