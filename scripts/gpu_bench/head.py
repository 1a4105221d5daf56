"""Head level: log-probs and entropy from hidden states, by the package's three modes, veRL's and Liger's kernels.

All sides get the same hidden states, weight and labels. The loss is the mean log-prob; entropy is computed in the
forward, as veRL does for its metrics, by all but Liger's cross entropy, which has none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu_bench.batch import Batch
from gpu_bench.comparison import Results
from gpu_bench.contest import Contestant, NotRun
from gpu_bench.models import Work
from gpu_bench.work import Passes
from torch import Tensor
from transformers import PretrainedConfig

from zorro_verl.log_probs import log_probs_from_hidden, log_probs_from_logits

FORWARD = Work("log-probs + entropy", Passes(0, 0, 1))
FORWARD_BACKWARD = Work("log-probs + entropy, backward", Passes(0, 0, 3), backward=True)

Values = dict[str, Tensor]


class HeadLevel:
    """Random hidden states of normed size, one for each response token of a batch.

    Args:
        config: hidden size and vocabulary.
        device: where it runs.
    """

    def __init__(self, config: PretrainedConfig, device: str):
        self.device, self.hidden, self.vocabulary = device, config.hidden_size, config.vocab_size

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(3)
        options = {"generator": generator, "device": self.device, "dtype": torch.bfloat16}
        hidden = torch.randn(batch.labels.numel(), self.hidden, **options)
        weight = torch.randn(self.vocabulary, self.hidden, **options) * 0.02
        return hidden, weight, batch.labels

    def contestants(self, batch: Batch, work: Work) -> tuple[Contestant, ...]:
        once = 2 * batch.labels.numel() * self.hidden * self.vocabulary
        kept = once * (3 if work.backward else 1)
        recomputed = once * (4 if work.backward else 1)

        def step(function: Callable[..., Values]):
            return _HeadStep(self, batch, work, function)

        def peer(load: Callable[[str], Callable[..., Values]]):
            return lambda: step(load(self.device))

        return (
            Contestant("torch: linear, float32 log_softmax", "baseline", lambda: step(_plain), kept),
            Contestant("zorro, none", "ours", lambda: step(partial(_from_logits, chunked=False)), kept),
            Contestant("zorro, compute", "ours", lambda: step(partial(_from_logits, chunked=True)), kept),
            Contestant("zorro, memory", "ours", lambda: step(_from_hidden), recomputed),
            Contestant("veRL linear_cross_entropy (Triton)", "peer", peer(_verl_triton), recomputed),
            Contestant("veRL FusedLinearForPPO (torch)", "peer", peer(_verl_torch), recomputed),
            Contestant("veRL FusedLinearForPPO (Liger)", "peer", peer(_verl_liger), kept),
            Contestant("Liger fused linear cross entropy, no entropy", "peer", peer(_liger), kept),
        )

    def close(self) -> None:
        """Its inputs go with the contestants."""

    def reference(self, batch: Batch, work: Work) -> Results:
        """Float32 from the hidden states on."""
        step = _HeadStep(self, batch, work, _plain, torch.float32)
        step.reset()
        step.run()
        return step.results()


class _HeadStep:
    def __init__(self, level, batch, work: Work, function: Callable[..., Values], dtype=torch.bfloat16):
        hidden, weight, self.labels = level.inputs(batch)
        self.leaves = [x.to(dtype).requires_grad_(work.backward) for x in (hidden, weight)]
        self.work, self.function, self.lens = work, function, batch.rows.response_lens.tolist()

    def reset(self) -> None:
        self.values, self.gradients = {}, ()

    def run(self) -> None:
        with torch.set_grad_enabled(self.work.backward):
            values = self.function(*self.leaves, self.labels)
        if self.work.backward:
            self.gradients = torch.autograd.grad(values["log_probs"].mean(), self.leaves)
        self.values = {name: x.detach() for name, x in values.items()}

    def results(self) -> Results:
        return Results(self.values, self.lens, dict(zip(("hidden", "weight"), self.gradients, strict=False)))


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Values:
    log_p = torch.nn.functional.linear(hidden, weight).float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return {"log_probs": log_p.gather(-1, labels[:, None])[:, 0], "entropy": entropy}


def _from_logits(hidden: Tensor, weight: Tensor, labels: Tensor, chunked: bool) -> Values:
    return log_probs_from_logits(torch.nn.functional.linear(hidden, weight), labels, 1.0, True, chunked).by_name()


def _from_hidden(hidden: Tensor, weight: Tensor, labels: Tensor) -> Values:
    return log_probs_from_hidden(hidden, weight, None, labels, 1.0, True).by_name()


def _verl_triton(device: str) -> Callable[..., Values]:
    if device != "cuda":
        raise NotRun(f"a Triton kernel, needs a cuda device, got {device}")
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def function(hidden: Tensor, weight: Tensor, labels: Tensor) -> Values:
        log_probs, entropy = linear_cross_entropy(hidden, weight, labels, 1.0, "none")
        return {"log_probs": log_probs, "entropy": entropy}

    return function


def _verl_torch(device: str) -> Callable[..., Values]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return partial(_fused, FusedLinearForPPO())


def _verl_liger(device: str) -> Callable[..., Values]:
    from verl.utils.experimental import torch_functional

    if torch_functional._LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY is None:
        raise NotRun("liger-kernel is not installed, or has no scaled cross entropy")
    return partial(_fused, torch_functional.FusedLinearForPPO(impl_backend="liger"))


def _fused(module, hidden: Tensor, weight: Tensor, labels: Tensor) -> Values:
    log_probs, entropy = module(hidden, weight, labels)
    return {"log_probs": log_probs, "entropy": entropy}


def _liger(device: str) -> Callable[..., Values]:
    if device != "cuda":
        raise NotRun(f"a Triton kernel, needs a cuda device, got {device}")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return lambda hidden, weight, labels: {"log_probs": -loss(weight, hidden, labels)}
