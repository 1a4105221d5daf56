"""The two ways to score a padded batch, called alike: a patched model and the stand-alone actor; and their oracle.

The oracle is the unpatched model on one unpadded row at a time, at the row's own positions. A patched model is scored
on every token of a row but its first, the actor on response tokens.
"""

import copy

import torch
from tiny import gradients, worst_gradient

from zorro_verl import Qwen3ModelOncePatcher

FLOAT64 = 5e-6  # Hugging Face keeps norms, rotary embeddings and softmax in float32 in a float64 model
KINDS = ("patched-eager", "patched-sdpa", "actor-eager", "actor-sdpa")


class PatchedModel:
    """A patched copy of a model. ``response_len=None`` lets it find the prompts."""

    def __init__(self, plain, attention, response_len=8, temperature=1.0, **options):
        self.model = copy.deepcopy(plain)
        self.patcher = Qwen3ModelOncePatcher(self.model, attn_implementation=attention, **options)
        self.patcher.patch(response_len=response_len, temperature=temperature)

    @property
    def stats(self):
        return self.patcher.stats

    @staticmethod
    def num_scored(batch):
        return (batch["attention_mask"].sum(1) - 1).clamp(min=0).tolist()

    def values(self, batch, **call):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        logits = self.model(**inputs, **call).logits
        assert logits.shape[:2] == batch["input_ids"].shape
        assert logits.isfinite().all()
        return scores([x[m] for x, m in zip(logits, batch["attention_mask"].bool(), strict=True)], batch, self)


class Actor:
    """The stand-alone actor on a copy of a model, by way of a checkpoint folder."""

    def __init__(self, plain, attention, folder, **options):
        from zorro_verl.actor import DeduplicatedActor  # and verl, which settles on a platform when it is imported

        plain.save_pretrained(folder)
        options = {"dtype": plain.dtype} | options
        self.actor = DeduplicatedActor(
            model_name_or_path=str(folder), device="cpu", attn_implementation=attention, **options
        )
        self.model = self.actor.model

    @property
    def stats(self):
        return self.actor.stats

    @staticmethod
    def num_scored(batch):
        return batch["attention_mask"][:, -batch["responses"].shape[1] :].sum(1).tolist()

    def values(self, batch, **call):
        output, lens = self.actor.forward(batch, calculate_entropy=True, **call), self.num_scored(batch)
        assert output.logprobs.shape == output.entropy.shape == (sum(lens),)
        return output.logprobs.split(lens), output.entropy.split(lens)


def make_subject(kind, plain, folder, **options):
    """The subject of one of `KINDS` for ``plain``; ``options`` are its constructor's."""
    name, attention = kind.split("-")
    return (
        PatchedModel(plain, attention, **options) if name == "patched" else Actor(plain, attention, folder, **options)
    )


def scores(logits, batch, subject):
    """Log-probs and entropies of each row's last tokens from its ``(L, V)`` logits."""
    log_probs, entropies = [], []
    for x, ids, mask, n in zip(
        logits, batch["input_ids"], batch["attention_mask"].bool(), subject.num_scored(batch), strict=True
    ):
        x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        log_p = x[len(x) - n - 1 : len(x) - 1].log_softmax(-1)
        log_probs.append(log_p.gather(-1, ids[mask][len(x) - n :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return log_probs, entropies


def oracle(plain, batch, subject, temperature=1.0):
    """What ``subject.values(batch)`` has to be."""
    temperature = torch.as_tensor(temperature).expand(len(batch["input_ids"]))
    logits = []
    for ids, mask, positions, t in zip(
        batch["input_ids"], batch["attention_mask"].bool(), batch["position_ids"], temperature, strict=True
    ):
        ids, positions = ids[mask][None], positions[mask][None]
        # A mask of ones keeps transformers from guessing at packed sequences where positions jump.
        out = plain(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False)
        logits.append(out.logits[0] / t)
    return scores(logits, batch, subject)


def loss_of(values, seed=0):
    """A sum in which every log-prob and every entropy has a weight of its own."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda x: torch.randn(len(x), generator=g, dtype=torch.float64)  # noqa: E731
    log_probs, entropies = values
    return sum((x * draw(x)).sum() + 0.3 * (e * draw(e)).sum() for x, e in zip(log_probs, entropies, strict=True))


def assert_rows(expected, got, tolerance=FLOAT64):
    """Every row by itself: a group's first is blind to most bugs."""
    for name, reference, values in zip(("log-probs", "entropy"), expected, got, strict=True):
        for row, (a, b) in enumerate(zip(reference, values, strict=True)):
            assert a.shape == b.shape, (name, row)
            assert not len(a) or (a - b).abs().max() <= tolerance, (name, row)


def check(subject, plain, batch, temperature=None, tolerance=FLOAT64):
    """Values of every row, and every parameter's gradient. ``temperature`` goes with the call."""
    for model in (plain, subject.model):
        model.zero_grad()
    call = {} if temperature is None else {"temperature": temperature}
    expected, got = oracle(plain, batch, subject, **call), subject.values(batch, **call)
    assert_rows(expected, got, tolerance)
    for values in (expected, got):
        loss_of(values).backward()
    assert worst_gradient(gradients(plain), gradients(subject.model)) <= tolerance
