"""Log-probabilities and entropy of chosen tokens, from logits or from hidden states, with both gradients.

With ``z = logits / temperature`` and ``p = softmax(z)``:

    log_prob = z[label] - logsumexp(z)          d/dz = onehot(label) - p
    entropy  = -sum_v p_v log p_v               d/dz = -p (log p + entropy)

The second line follows from ``dp_v/dz_u = p_v (1[u = v] - p_u)``. Nothing of size V is kept for the backward but the
logits themselves, and from hidden states not even those. The sum of squares, ``sum_v p_v**2``, is given without a
gradient: verl's baselines (``optimal_token_baseline``) take it from a pass that has none.
"""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_OPTIMIZATIONS = ("none", "compute", "memory")
# float32 logits of one chunk in the chunked modes. A CPU is fastest with few rows. An accelerator reads the head's
# whole weight for each chunk, which takes some hundreds of rows to be worth it: these are 800 of 150,000 words.
CHUNK_BYTES = 64 << 20
ACCELERATOR_CHUNK_BYTES = 512 << 20
MIN_TEMPERATURE = 1e-8  # verl's own floor: temperature 0 gives huge, finite logits


class Scores(NamedTuple):
    """Of each scored token, ``(R,)`` in float32 (float64 for float64 logits); None for what was not asked for.

    Attributes:
        log_probs, entropy: in nats.
        sum_pi_squared: the sum of squared probabilities; no gradient.
    """

    log_probs: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None

    def by_name(self) -> dict[str, Tensor]:
        """Those that were asked for."""
        return {name: values for name, values in self._asdict().items() if values is not None}


def check_temperature(temperature: float | Tensor, num_rows: int | None = None, zero: bool = True) -> float | Tensor:
    """A temperature as users give it: a number, or a tensor of one for all or ``(B,)``.

    Args:
        temperature: what came; given back as it is.
        num_rows: B, where it is known.
        zero: whether 0 is allowed; it counts as `MIN_TEMPERATURE`, as in verl.

    Raises:
        ValueError: no number, another shape, NaN, or a value below 0 (or 0).
    """
    if not isinstance(temperature, Tensor | Real) or isinstance(temperature, bool):
        raise ValueError(f"temperature: expected a float or a (B,) tensor, got {type(temperature).__name__}")
    if isinstance(temperature, Tensor):
        shapes = ((), (1,), (temperature.numel() if num_rows is None else num_rows,))
        if tuple(temperature.shape) not in shapes:
            expected = "(B,)" if num_rows is None else f"({num_rows},)"
            raise ValueError(f"temperature: expected a float or {expected}, got {tuple(temperature.shape)}")
    if not bool(torch.as_tensor(temperature >= 0 if zero else temperature > 0).all()):
        raise ValueError(f"temperature: expected values {'of at least' if zero else 'above'} 0, got {temperature}")
    return temperature


def log_probs_from_logits(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    calculate_entropy: bool,
    chunked: bool = False,
    calculate_sum_pi_squared: bool = False,
) -> Scores:
    """Log-probs, and what else is asked for, of given logits.

    Args:
        logits: ``(R, V)`` of any float dtype, not yet divided by the temperature.
        labels: ``(R,)`` int64.
        temperature: one float, or ``(R,)``.
        calculate_entropy, calculate_sum_pi_squared: else these are None.
        chunked: work on `chunk_bytes` of logits at a time, so that no second ``(R, V)`` tensor is made.
    """
    rows = _rows_per_chunk(logits.shape[1], logits.device) if chunked else max(1, logits.shape[0])
    inverse = _inverse_temperature(temperature, logits)
    wanted = (calculate_entropy, calculate_sum_pi_squared)
    return _wanted(wanted, *_FromLogits.apply(logits, labels, inverse, wanted, rows))


def log_probs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float | Tensor,
    calculate_entropy: bool,
    calculate_sum_pi_squared: bool = False,
) -> Scores:
    """The same of ``hidden @ weight.T + bias``, projected in chunks and recomputed in the backward.

    At no time are more than `chunk_bytes` of float32 logits alive (a few times that with their temporaries).

    Args:
        hidden: ``(R, E)``; weight: ``(V, E)``; bias: ``(V,)`` or None. Under autocast both are cast as a linear is.
        labels, temperature, calculate_entropy, calculate_sum_pi_squared: as in `log_probs_from_logits`.
    """
    hidden, weight, bias = _autocast(hidden), _autocast(weight), None if bias is None else _autocast(bias)
    inverse = _inverse_temperature(temperature, hidden)
    wanted = (calculate_entropy, calculate_sum_pi_squared)
    return _wanted(wanted, *_FromHidden.apply(hidden, weight, bias, labels, inverse, wanted))


def chunk_bytes(device: str) -> int:
    """Of the float32 logits of one chunk, on a type of device."""
    return CHUNK_BYTES if device == "cpu" else ACCELERATOR_CHUNK_BYTES


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, inverse, wanted, rows):
        ctx.set_materialize_grads(False)
        ctx.entropy_wanted = wanted[0]
        stats = [
            _statistics(logits[part], labels[part], _of(inverse, part), wanted)
            for part in _chunks(logits.shape[0], rows)
        ]
        log_probs, entropy, squares, peak, log_total = (torch.cat(column) for column in zip(*stats, strict=True))
        ctx.save_for_backward(logits, labels, inverse, peak, log_total, entropy)
        ctx.rows = rows
        ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy, _):
        grad_entropy = grad_entropy if ctx.entropy_wanted else None  # torch.compile makes one of no elements
        logits, *statistics = ctx.saved_tensors
        parts = _chunks(logits.shape[0], ctx.rows)
        grad = torch.empty_like(logits) if len(parts) > 1 else None
        for part in parts:
            piece = _logits_grad(logits[part], grad_log_probs, grad_entropy, part, *statistics)
            if grad is None:
                grad = piece.to(logits.dtype)
            else:
                grad[part] = piece
            del piece  # else the next chunk's is made beside it
        return grad, None, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, inverse, wanted):
        ctx.set_materialize_grads(False)
        ctx.entropy_wanted = wanted[0]
        ctx.rows = rows = _rows_per_chunk(weight.shape[0], weight.device)
        stats = []
        for part in _chunks(hidden.shape[0], rows):
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            stats.append(_statistics(logits, labels[part], _of(inverse, part), wanted))
            del logits  # here and below: else the next chunk is made beside this one
        log_probs, entropy, squares, peak, log_total = (torch.cat(column) for column in zip(*stats, strict=True))
        ctx.save_for_backward(hidden, weight, bias, labels, inverse, peak, log_total, entropy)
        ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy, _):
        grad_entropy = grad_entropy if ctx.entropy_wanted else None
        hidden, weight, bias, *statistics = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        sums = _statistics_dtype(hidden)
        grad_weight = torch.zeros_like(weight, dtype=sums) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=sums) if need_bias else None
        for part in _chunks(hidden.shape[0], ctx.rows):
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            grad = _logits_grad(logits, grad_log_probs, grad_entropy, part, *statistics).to(weight.dtype)
            del logits
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None and grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.T, hidden[part])
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            del grad
        cast = lambda total, like: None if total is None else total.to(like.dtype)  # noqa: E731
        return grad_hidden, cast(grad_weight, weight), cast(grad_bias, bias), None, None, None


def _wanted(wanted: tuple[bool, bool], log_probs: Tensor, entropy: Tensor, squares: Tensor) -> Scores:
    return Scores(log_probs, entropy if wanted[0] else None, squares if wanted[1] else None)


def _statistics(
    logits: Tensor, labels: Tensor, inverse: Tensor | None, wanted: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of each row: log-prob, entropy, sum of squares, largest logit, log-sum-exp relative to it.

    Entropy and sum of squares are zero-length when not wanted.
    """
    peak = logits.amax(-1).to(_statistics_dtype(logits))
    # log_softmax takes the peak away by itself, but after the division by a small temperature its digits are gone.
    log_p = (logits.to(peak.dtype) if inverse is None else _shifted(logits, peak, inverse)).log_softmax(-1)
    log_probs = log_p.gather(-1, labels[:, None])[:, 0]
    log_total = -log_p.amax(-1)
    entropy = -log_p.exp().mul_(log_p).sum(-1) if wanted[0] else peak[:0]
    squares = (2 * log_p).exp_().sum(-1) if wanted[1] else peak[:0]
    return log_probs, entropy, squares, peak, log_total


def _logits_grad(
    logits: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    part: slice,
    labels: Tensor,
    inverse: Tensor | None,
    peak: Tensor,
    log_total: Tensor,
    entropy: Tensor,
) -> Tensor:
    """``(rows, V)`` gradient of the logits; the formulas stand in the module's docstring.

    ``logits`` are those of ``part``; all else is whole. With ``s = z - max z`` and ``t`` its log-sum-exp, p is
    ``exp(s) exp(-t)`` and log p is ``s - t``: the factors of a row are multiplied first, so that each costs no pass.
    """
    labels, peak, log_total, inverse = labels[part], peak[part], log_total[part], _of(inverse, part)
    shifted, scale = _shifted(logits, peak, inverse), torch.exp(-log_total)
    if grad_entropy is not None:
        p = shifted.exp()
        grad = shifted.add_((entropy[part] - log_total)[:, None]).mul_(p).mul_((-grad_entropy[part] * scale)[:, None])
        if grad_log_probs is not None:
            grad.addcmul_(p, (grad_log_probs[part] * scale)[:, None], value=-1.0)
    elif grad_log_probs is not None:
        grad = shifted.exp_().mul_((-grad_log_probs[part] * scale)[:, None])
    else:
        return torch.zeros_like(logits)
    if grad_log_probs is not None:
        grad.scatter_add_(-1, labels[:, None], grad_log_probs[part, None])
    return grad if inverse is None else grad.mul_(inverse[:, None])


def _shifted(logits: Tensor, peak: Tensor, inverse: Tensor | None) -> Tensor:
    """A new ``(rows, V)``: logits below the row's largest, over temperature; exact where it matters, near the peak."""
    shifted = logits - peak[:, None]
    return shifted if inverse is None else shifted.mul_(inverse[:, None])


def _inverse_temperature(temperature: float | Tensor, like: Tensor) -> Tensor | None:
    """``(R,)`` in the dtype of the statistics; None for the number 1, which costs no pass over the logits."""
    if not isinstance(temperature, Tensor) and temperature == 1:
        return None
    temperature = torch.as_tensor(temperature, dtype=_statistics_dtype(like), device=like.device)
    if temperature.dim() > 1 or temperature.numel() not in (1, like.shape[0]):
        raise ValueError(
            f"temperature: expected a float or one value per scored token ({like.shape[0]}), "
            f"got shape {tuple(temperature.shape)}"
        )
    return temperature.clamp(min=MIN_TEMPERATURE).reciprocal().expand(like.shape[0])


def _autocast(x: Tensor) -> Tensor:
    """As autocast casts the arguments of a linear: float64 stays what it is."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(rows: int, per_chunk: int) -> list[slice]:
    """At least one, so that an empty batch has statistics too."""
    return [slice(i, i + per_chunk) for i in range(0, max(1, rows), per_chunk)]


def _of(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _rows_per_chunk(vocabulary: int, device: torch.device) -> int:
    return max(1, chunk_bytes(device.type) // (4 * vocabulary))
