"""Rows gathered by index: values, zeros at -1, gradients summed over copies; plain, and by the Triton kernels."""

from __future__ import annotations

from textwrap import dedent

import pytest
import torch
from fresh_process import run_python

from zorro_verl.reconstruct import gather_rows

SHAPES = [
    pytest.param((5,), (3, 4), id="scalars"),
    pytest.param((5, 3), (7,), id="rows"),
    pytest.param((5, 3), (), id="one-row"),
    pytest.param((4, 2, 3), (2, 6), id="heads"),
    pytest.param((1, 7), (9,), id="one-source"),
    pytest.param((5, 3), (0,), id="no-index"),
    pytest.param((5, 3), (2, 0), id="no-columns-of-index"),
    pytest.param((5, 0), (4,), id="no-columns"),
    pytest.param((0, 3), (4,), id="no-source"),
    pytest.param((0,), (0,), id="nothing"),
]


def random_case(source, wanted, dtype=torch.float64, seed=0):
    """Values, an index with entries of -1 and repeated ones, and an upstream gradient."""
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, source[0], wanted, generator=g)
    values = torch.randn(source, generator=g, dtype=torch.float64).to(dtype)
    return values, index, torch.randn(*wanted, *source[1:], generator=g, dtype=torch.float64).to(dtype)


def by_loop(values, index):
    rows = [values[t] if t >= 0 else torch.zeros_like(values[0]) for t in index.flatten().tolist() if len(values)]
    return (
        torch.stack(rows).view(index.shape + values.shape[1:])
        if rows
        else values.new_zeros(index.shape + values.shape[1:])
    )


@pytest.mark.parametrize(("source", "wanted"), SHAPES)
def test_values_against_a_loop(source, wanted):
    values, index, _ = random_case(source, wanted)
    got = gather_rows(values, index)
    assert got.shape == index.shape + values.shape[1:]
    assert torch.equal(got, by_loop(values, index))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_stays_what_it_is(dtype):
    values = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    got = gather_rows(values, torch.tensor([1, -1, 0, 1]))
    assert got.dtype == dtype
    assert got.tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 1]]
    assert not got.requires_grad


@pytest.mark.parametrize(("source", "wanted"), SHAPES)
def test_gradient_sums_over_the_copies(source, wanted):
    values, index, upstream = random_case(source, wanted)
    values.requires_grad_()
    (got,) = torch.autograd.grad(gather_rows(values, index), values, upstream)
    expected = torch.zeros_like(values)
    for t, row in zip(index.flatten().tolist(), upstream.reshape(index.numel(), *source[1:]), strict=True):
        if t >= 0:
            expected[t] += row
    torch.testing.assert_close(got, expected, atol=1e-14, rtol=0)


def test_gradcheck():
    values, index, _ = random_case((4, 3), (2, 5))
    assert (index == -1).any()
    assert torch.autograd.gradcheck(lambda v: gather_rows(v, index), values.requires_grad_())


def test_what_is_not_finite_stays_where_it_is():
    """A row of zeros is zeros beside an infinite row 0, and an infinite gradient at a -1 goes nowhere."""
    values = torch.tensor([[float("inf")], [float("nan")], [2.0]], requires_grad=True)
    got = gather_rows(values, torch.tensor([-1, 2, 1]))
    assert got[0].item() == 0
    (gradient,) = torch.autograd.grad(got, values, torch.tensor([[float("nan")], [3.0], [4.0]]))
    assert gradient.flatten().tolist() == [0, 4, 3]


def test_views_and_expanded_gradients():
    values = torch.arange(12.0).view(3, 4).t()[::2].requires_grad_()
    got = gather_rows(values, torch.tensor([[1, -1], [0, 1]]).t())
    assert got.tolist() == [[[2, 6, 10], [0, 4, 8]], [[0, 0, 0], [2, 6, 10]]]
    (gradient,) = torch.autograd.grad(got.sum(), values)
    assert gradient.tolist() == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("values", "index", "said"),
    [
        (torch.tensor(1.0), torch.tensor([0]), r"values: expected a \(T, \.\.\.\) tensor, got a scalar"),
        (torch.ones(2, 3), torch.tensor([0], dtype=torch.int32), "index: expected an int64 tensor, got torch.int32"),
        (torch.ones(2, 3), torch.tensor([0], device="meta"), "index: expected .* device of values, cpu, got meta"),
    ],
)
def test_bad_input(values, index, said):
    with pytest.raises(ValueError, match=said):
        gather_rows(values, index)


# What both the interpreter and a GPU run: GatherRows against index_select, forward and backward.
KERNELS = """
import torch
from zorro_verl.triton_reconstruct import MAX_BLOCK, GatherRows

def check(values, index, upstream, tolerance):
    values = values.detach().requires_grad_()
    got = GatherRows.apply(values, index)
    expected = values.detach().index_select(0, index.clamp(min=0)) * (index >= 0)[:, None]
    assert torch.equal(got, expected), "values"
    (gradient,) = torch.autograd.grad(got, values, upstream, retain_graph=True)
    (again,) = torch.autograd.grad(got, values, upstream)
    assert torch.equal(gradient, again), "another run, another sum"
    assert gradient.dtype == values.dtype and gradient.shape == values.shape
    kept = index >= 0
    exact, size = torch.zeros(2, *values.shape, dtype=torch.float64, device=values.device)
    exact.index_add_(0, index[kept], upstream[kept].double())
    size.index_add_(0, index[kept], upstream[kept].double().abs())
    error = (gradient.double() - exact).abs()
    assert bool((error <= tolerance * size).all()), error.max()

def check_all(device, rounding, columns=(1, 3, 64, MAX_BLOCK + 5)):
    g = torch.Generator().manual_seed(0)
    # bfloat16 is summed in float32 and rounded once.
    for dtype, tolerance in ((torch.float32, 3e-7), (torch.bfloat16, rounding + 3e-7), (torch.float64, 6e-16)):
        for width in columns:
            values = torch.randn(5, width, generator=g, dtype=torch.float64).to(device, dtype)
            upstream = torch.randn(9, width, generator=g, dtype=torch.float64).to(device, dtype)
            index = torch.tensor([3, -1, 0, 3, 4, -1, 3, 0, 3], device=device)  # rows 1 and 2 have no copy
            check(values, index, upstream, tolerance)
            check(values.t().contiguous().t(), index, upstream.t().contiguous().t(), tolerance)
            check(values, index, upstream[:1, :1].expand(9, width), tolerance)

    many = torch.zeros(300, dtype=torch.int64, device=device)
    one = torch.ones(1, 2, dtype=torch.bfloat16, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(GatherRows.apply(one, many).sum(), one)
    assert gradient.tolist() == [[300, 300]], gradient  # bfloat16 cannot count beyond 256

    for rows, columns, index in ((0, 3, [-1, -1]), (3, 0, [0, -1]), (3, 2, []), (0, 0, [])):
        values = torch.ones(rows, columns, device=device, requires_grad=True)
        got = GatherRows.apply(values, torch.tensor(index, dtype=torch.int64, device=device))
        assert got.shape == (len(index), columns) and not got.any()
        (gradient,) = torch.autograd.grad(got.sum(), values)
        assert gradient.shape == values.shape and not gradient.any()

    values = torch.ones(2, 2, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad((GatherRows.apply(values, many[:2]) ** 2).sum(), values, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        assert "once_differentiable" in str(error), error
    else:
        raise AssertionError("a second derivative that is not there")
"""


def test_the_kernels_in_the_interpreter():
    """The interpreter cuts bfloat16 off where a GPU rounds it, so its error may be a whole unit in the last place."""
    code = KERNELS + "check_all('cpu', rounding=2.0**-7)\nprint('CHECKED')"
    assert "CHECKED" in run_python(code, TRITON_INTERPRET="1")


def test_the_kernels_compile_for_a_gpu_and_use_no_atomics():
    code = """
    import triton
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from zorro_verl.triton_reconstruct import _gather_kernel, _segment_sum_kernel

    def ptx(kernel, signature, **constants):
        signature = signature | {name: "constexpr" for name in constants}
        source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants)
        return triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]

    strides = {"row_stride": "i64", "column_stride": "i32", "num_columns": "i32"}
    for dtype, acc in (("fp32", tl.float32), ("bf16", tl.float32), ("fp16", tl.float32), ("fp64", tl.float64)):
        tensors = {"values": "*" + dtype, "grads": "*" + dtype, "out": "*" + dtype}
        indices = {"index": "*i64", "order": "*i64", "bounds": "*i64"}
        for kernel, constants in ((_gather_kernel, {}), (_segment_sum_kernel, {"ACC": acc})):
            text = ptx(kernel, tensors | indices | strides, BLOCK=256, **constants)
            assert "st.global" in text
            assert "atom" not in text and "red." not in text
            rounds = "cvt.rn.bf16" in text
            assert rounds == (dtype == "bf16" and kernel is _segment_sum_kernel)
    print("CHECKED")
    """
    assert "CHECKED" in run_python(code)


def test_without_triton_torch_ops_are_left():
    """On a GPU, too: the choice falls back to the very ops that a CPU always takes."""
    code = """
    import sys
    sys.modules["triton"] = None
    import torch
    from zorro_verl import reconstruct
    assert reconstruct._triton() is None
    values, index = torch.arange(6.0).view(3, 2), torch.tensor([2, -1, 0])
    expected = torch.tensor([[4.0, 5.0], [0.0, 0.0], [0.0, 1.0]])
    assert torch.equal(reconstruct.gather_rows(values, index), expected)
    print("CHECKED")
    """
    assert "CHECKED" in run_python(code)


@pytest.mark.gpu
def test_the_kernels_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    code = """
    check_all("cuda", rounding=2.0**-8)
    from zorro_verl.reconstruct import gather_rows
    values = torch.randn(50, 3, 700, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    index = torch.randint(-1, 50, (8, 90), device="cuda")
    upstream = torch.randn(8, 90, 3, 700, device="cuda", dtype=torch.bfloat16)
    got = gather_rows(values, index)
    assert "GatherRows" in str(got.grad_fn.next_functions)
    assert torch.equal(got.cpu(), gather_rows(values.cpu(), index.cpu()))
    (gradient,) = torch.autograd.grad(got, values, upstream)
    plain = values.detach().cpu().float().requires_grad_()
    (expected,) = torch.autograd.grad(gather_rows(plain, index.cpu()), plain, upstream.cpu().float())
    assert torch.allclose(gradient.cpu().float(), expected, rtol=2.0**-8, atol=1e-5)
    print("CHECKED")
    """
    assert "CHECKED" in run_python(KERNELS + dedent(code))
