"""Two partial results of attention merged in place: by torch ops, and by the Triton kernel."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from fresh_process import run_python
from torch.utils._python_dispatch import TorchDispatchMode

from zorro_verl import merge
from zorro_verl.merge import merge_


def case(rows, heads, head_dim, dtype, seed=0):
    """``out, lse, part, part_lse``; each log-sum-exp has queries without keys, and query 3 has none in both."""
    g = torch.Generator().manual_seed(seed)
    outs = [torch.randn(rows, heads, head_dim, generator=g, dtype=torch.float64) for _ in range(2)]
    lses = [4 * torch.randn(heads, rows, generator=g, dtype=torch.float64) for _ in range(2)]
    for out, lse, blind in zip(outs, lses, ([1, 3], [2, 3]), strict=True):
        out[blind], lse[:, blind] = 0, -torch.inf
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return outs[0].to(dtype), lses[0].to(wide), outs[1].to(dtype), lses[1].to(wide)


def by_definition(out, lse, part, part_lse):
    """In float64: exp(lse - L) out + exp(part_lse - L) part, and L."""
    out, lse, part, part_lse = (x.double() for x in (out, lse, part, part_lse))
    total = torch.logaddexp(lse, part_lse)
    shares = [(x - total).exp().nan_to_num(0).T[..., None] for x in (lse, part_lse)]
    return out * shares[0] + part * shares[1], total


def strided(out, lse, part, part_lse):
    """The same values as views into larger tensors, and with every stride another."""
    big_out = out.new_full((out.shape[0] + 2, *out.shape[1:]), 7)
    big_lse = lse.new_full((lse.shape[1] + 2, lse.shape[0]), 7)
    views = big_out[2:], big_lse.T[:, 2:]
    views[0].copy_(out)
    views[1].copy_(lse)
    return *views, part.permute(2, 1, 0).contiguous().permute(2, 1, 0), part_lse.T.contiguous().T


ROUNDING = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("layout", [lambda *x: x, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("chunk", [merge.CHUNK, 40])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_merge_equals_its_definition(dtype, chunk, layout, monkeypatch):
    """Half precision is as near as rounding the exact result once would be."""
    monkeypatch.setattr(merge, "CHUNK", chunk)
    values = case(11, 3, 5, dtype)
    wanted, wanted_lse = by_definition(*values)
    out, lse, *part = layout(*(x.clone() for x in values))
    assert merge_(out, lse, *part) is None
    assert out.dtype == dtype
    error = (out.double() - wanted).abs()
    bound = ROUNDING[dtype] * wanted.abs() + (1e-14 if dtype == torch.float64 else 1e-6)
    assert bool((error <= bound).all()), error.max()
    assert torch.equal(lse == -torch.inf, wanted_lse == -torch.inf)
    seen = wanted_lse != -torch.inf
    torch.testing.assert_close(lse[seen].double(), wanted_lse[seen], rtol=0, atol=1e-6)
    assert not out[3].any()
    assert torch.equal(out[2], values[0][2])  # the part saw nothing
    assert torch.equal(out[1], values[2][1])  # only the part saw something


def test_half_precision_is_rounded_once():
    """Two roundings, of the weight or of a product, would show."""
    values = case(4000, 2, 16, torch.bfloat16)
    wanted, _ = by_definition(*values)
    out, lse, *part = values
    merge_(out, lse, *part)
    assert (out == wanted.to(torch.bfloat16)).double().mean() > 0.999


def test_no_full_size_copy_in_float32(monkeypatch):
    monkeypatch.setattr(merge, "CHUNK", 160)
    values = case(64, 4, 8, torch.bfloat16)
    largest = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32 and result.dim() == 3:
                largest.append(result.untyped_storage().nbytes() // 4)
            return result

    with Spy():
        merge_(*values)
    assert 128 <= max(largest) <= max(160, values[1].numel())
    assert max(largest) < values[0].numel() / 2


def test_nan_is_not_hidden():
    out, lse, part, part_lse = case(5, 1, 2, torch.float32)
    part_lse[0, 0] = torch.nan
    merge_(out, lse, part, part_lse)
    assert out[0].isnan().all()
    assert lse[0, 0].isnan()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(0, 2, 4), (4, 0, 4), (1, 1, 1)])
def test_nothing_and_one(rows, heads, head_dim):
    out, part = torch.ones(rows, heads, head_dim), torch.zeros(rows, heads, head_dim)
    lse, part_lse = torch.zeros(heads, rows), torch.zeros(heads, rows)
    merge_(out, lse, part, part_lse)
    assert bool((out == 0.5).all())


HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

# What both the interpreter and a GPU run: the kernel against the torch ops.
KERNEL = """
import torch
from test_merge import ROUNDING, case, strided
from zorro_verl import merge
from zorro_verl.triton_merge import merge_

def check(values, rounding):
    wanted, wanted_lse = (x.clone() for x in values[:2])
    merge._plain(wanted, wanted_lse, *values[2:])
    out, lse, *part = values
    merge_(out, lse, *part)
    assert torch.equal(lse == -torch.inf, wanted_lse == -torch.inf)
    assert not out[3].any(), "a query without keys"
    slack = 1e-13 if out.dtype == torch.float64 else 2e-6
    error = (out.double() - wanted.double()).abs()
    assert bool((error <= rounding * wanted.double().abs() + slack).all()), error.max()
    seen = lse != -torch.inf
    assert torch.allclose(lse[seen], wanted_lse[seen], rtol=0, atol=slack)

def check_all(device, truncated):
    for dtype, rounding in ROUNDING.items():
        half = dtype in (torch.bfloat16, torch.float16)
        for rows, heads, head_dim in ((5, 2, 8), (37, 3, 64), (9, 1, 96), (70, 2, 128)):
            for layout in (lambda *x: x, strided):
                values = layout(*(x.to(device) for x in case(rows, heads, head_dim, dtype)))
                check(values, rounding * (3 if truncated and half else 1 + half))
"""


def test_the_kernel_in_the_interpreter():
    """The interpreter cuts bfloat16 off where a GPU rounds it."""
    code = KERNEL + "check_all('cpu', truncated=True)\nprint('CHECKED')"
    assert "CHECKED" in run_python(code, TRITON_INTERPRET="1", PYTHONPATH=HERE)


def test_the_kernel_compiles_for_a_gpu_and_touches_everything_once():
    code = """
    import triton
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from zorro_verl.triton_merge import _merge_kernel

    for dtype, acc in (("fp32", tl.float32), ("bf16", tl.float32), ("fp16", tl.float32), ("fp64", tl.float64)):
        wide = "*fp64" if dtype == "fp64" else "*fp32"
        constants = {"D": 128, "ACC": acc, "ROWS": 16, "COLUMNS": 128}
        signature = {"out": "*" + dtype, "part": "*" + dtype, "lse": wide, "part_lse": wide, "num_rows": "i32"}
        signature |= {name: "constexpr" for name in constants}
        signature = {name: signature.get(name, "i32") for name in _merge_kernel.arg_names}
        source = ASTSource(_merge_kernel, signature, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
        ttir, ptx = compiled.asm["ttir"], compiled.asm["ptx"]
        assert ttir.count("tt.load") == 4 and ttir.count("tt.store") == 2, ttir
        assert "atom" not in ptx and "red." not in ptx.replace("shared.", "")
        assert ("cvt.rn.bf16" in ptx) == (dtype == "bf16")
    print("CHECKED")
    """
    assert "CHECKED" in run_python(code)


def test_without_triton_torch_ops_are_left():
    code = """
    import sys
    sys.modules["triton"] = None
    import torch
    from zorro_verl import merge
    assert merge._triton() is None
    out = torch.ones(1, 1, 2)
    merge.merge_(out, torch.zeros(1, 1), torch.zeros(1, 1, 2), torch.zeros(1, 1))
    assert out.tolist() == [[[0.5, 0.5]]]
    print("CHECKED")
    """
    assert "CHECKED" in run_python(code)


@pytest.mark.gpu
def test_the_kernel_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    code = """
    check_all("cuda", truncated=False)
    values = [x.cuda() for x in case(300, 8, 128, torch.bfloat16)]
    wanted = [x.clone() for x in values]
    merge._plain(*wanted)
    merge.merge_(*values)
    assert torch.allclose(values[0].float(), wanted[0].float(), rtol=2.0**-7, atol=1e-6)
    print("CHECKED")
    """
    assert "CHECKED" in run_python(KERNEL + dedent(code), PYTHONPATH=HERE)
