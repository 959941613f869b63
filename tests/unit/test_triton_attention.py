"""The Triton kernel of `batch_invariant` on GPUs, by Triton's interpreter and its compilers.

Both need Triton, but no GPU. The interpreter has no bfloat16 products.
"""

import pytest

from tests.triton import needs_triton, run

pytestmark = needs_triton


REFERENCE = """
    import torch
    from fly.execution import triton_attention

    def reference(query, key, value, slots, positions, scaling):
        group = query.shape[1] // key.shape[1]
        rows = []
        for token, (slot, position) in enumerate(zip(slots, positions)):
            keys, values = (
                part[slot, :, : position + 1].double().repeat_interleave(group, 0)
                for part in (key, value)
            )
            scores = (keys @ query[token].double()[:, :, None])[..., 0] * scaling
            rows.append((scores.softmax(-1)[:, None] @ values)[:, 0])
        return torch.stack(rows)

    def example(dtype, heads, kv_heads, size, value_size):
        torch.manual_seed(0)
        query = torch.randn(5, heads, size).to(dtype)
        key = torch.randn(3, kv_heads, 256, size).to(dtype)
        value = torch.randn(3, kv_heads, 256, value_size).to(dtype)
        value[1, :, 65:] = torch.nan  # another sequence's, behind the end of this one
        places = torch.tensor([0, 2, 1, 2, 2]), torch.tensor([0, 63, 64, 200, 255])
        return query, key, value, *places, 0.3
"""


def test_it_attends_to_a_tokens_own_keys_and_to_nothing_else():
    """Heads that share keys, sizes that are no powers of two, a block's ends; a token alone has the
    bits that it has beside others."""
    script = """
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 3e-3)):
        for shape in ((12, 2, 32, 32), (4, 4, 80, 80), (6, 1, 24, 16), (20, 1, 16, 16)):
            given = example(dtype, *shape)
            output = triton_attention.attention(*given)
            assert output.dtype == dtype
            torch.testing.assert_close(output.double(), reference(*given), atol=limit, rtol=0)
            query, key, value, slots, positions, scaling = given
            for token in range(5):
                own = slice(token, token + 1)
                alone = query[own], key, value, slots[own], positions[own], scaling
                assert torch.equal(triton_attention.attention(*alone)[0], output[token])
    """
    run(REFERENCE + script, TRITON_INTERPRET="1")


def test_a_kernel_that_sees_a_key_too_many_is_caught():
    script = """
    query, key, value, slots, positions, scaling = given = example(torch.float32, 4, 2, 16, 16)
    output = triton_attention.attention(query, key, value, slots, positions.clamp(max=63), scaling)
    assert (output - reference(*given)).abs().max() > 0.01
    """
    run(REFERENCE + script, TRITON_INTERPRET="1")


def test_a_model_decodes_with_it_as_with_products():
    """The whole way from a pass to the kernel, and a graph's one shape for all lengths."""
    script = """
    import torch
    from fly.execution import token_attention, uniform_passes
    from tests import invariance, tiny

    uniform_passes.WIDTH = 6
    torch.set_num_threads(1)
    model = tiny.model(seed=0, vocab=96)

    def make(slots):
        runner = tiny.runner(model, slots, max_length=128)
        runner.use_uniform_passes(capture=False)
        return runner

    products, _ = invariance.walk(make, widths=[5, 1])
    token_attention.reads_in_place = lambda device, dtype: True
    kernels, kept = invariance.walk(make, widths=[5, 1])
    torch.testing.assert_close(kernels, products, atol=1e-4, rtol=1e-4)
    others, also_kept = invariance.walk(make, slots=2, slot=1, widths=[2, 4])
    assert torch.equal(others, kernels)
    assert all(map(torch.equal, kept, also_kept))
    assert not token_attention._failures
    """
    run(script, TRITON_INTERPRET="1")


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_it_compiles_for_gpus_and_fits_on_them(kind):
    """NVIDIA's from Ampere on and AMD's; the memory that blocks of any GPU have."""
    script = f"""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from fly.execution import triton_attention

    kernel, kind = triton_attention.attend, "{kind}"
    keys = triton_attention.KEYS_OF[4 if kind == "fp32" else 2]
    for size in (64, 80, 128, 256):
        power = triton.next_power_of_2(size)
        constants = dict(
            GROUP=6, ROWS=16, SIZE=size, SIZE_2=power, VALUE=size, VALUE_2=power, KEYS=keys
        )
        types = {{name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}}
        types |= dict.fromkeys(("query", "key", "value", "output"), "*" + kind)
        types |= {{"slots": "*i64", "positions": "*i64", "scaling": "fp32"}}
        places = {{(kernel.arg_names.index(name),): value for name, value in constants.items()}}
        source = ASTSource(fn=kernel, signature=types, constexprs=places)
        for target, most in (
            (GPUTarget("cuda", 80, 32), 99 << 10),
            (GPUTarget("cuda", 90, 32), 99 << 10),
            (GPUTarget("hip", "gfx942", 64), 64 << 10),
        ):
            shared = triton.compile(source, target=target).metadata.shared
            print(kind, size, target.arch, shared)
            assert shared <= most, (size, target, shared)
    """
    assert len(run(script, TRITON_INTERPRET="0").splitlines()) == 12
