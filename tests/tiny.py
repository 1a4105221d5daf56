"""Tiny random models, ragged batches, and the oracle: the unpatched model on one unpadded row at a time."""

import random

import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM

from zorro_verl.grouping import Rows, exclusive_cumsum

VOCAB = 61


def tiny_model(model_type="qwen3", dtype=torch.float64, seed=0, **config):
    """A two-layer model with GQA whose weights are enlarged, so that its predictions are sharp."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **settings | config), attn_implementation="sdpa"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.to(dtype)


def tokens(length, generator):
    return torch.randint(1, VOCAB, (length,), generator=generator)


def batch_b0(seed=0):
    """Eight rows, three prompts (of 5, 1 and 7 tokens, the last with pad == eos inside), ragged responses.

    Two identical responses, an empty one, one-token ones; groups of 3, 1 and 4.
    """
    g = torch.Generator().manual_seed(seed)
    twice = tokens(6, g)
    prompts = [tokens(5, g), tokens(1, g), torch.tensor([3, 4, 0, 5, 6, 0, 7])]
    responses = [
        [twice, twice, tokens(6, g)],
        [tokens(3, g)],
        [tokens(1, g), tokens(0, g), tokens(5, g), tokens(8, g)],
    ]
    return [(p, r) for p, group in zip(prompts, responses, strict=True) for r in group]


def shuffled(rows, seed):
    rows = list(rows)
    random.Random(seed).shuffle(rows)
    return rows


def flat_rows(rows):
    """A list of (prompt, response) as `Rows`."""
    lens = torch.tensor([len(p) + len(r) for p, r in rows])
    return Rows(
        torch.cat([torch.cat(row) for row in rows]),
        torch.cat([torch.arange(n) for n in lens.tolist()]),
        exclusive_cumsum(lens),
        torch.tensor([len(p) for p, _ in rows]),
    )


def padded_batch(rows, prompt_width=None, response_width=None, pad=0):
    """A list of (prompt, response) as the dict that the stand-alone actor takes: left- and right-padded."""
    p_width = prompt_width or max(len(p) for p, _ in rows)
    r_width = response_width or max(1, max(len(r) for _, r in rows))
    ids = torch.full((len(rows), p_width + r_width), pad)
    mask = torch.zeros_like(ids)
    for i, (p, r) in enumerate(rows):
        ids[i, p_width - len(p) : p_width] = p
        ids[i, p_width : p_width + len(r)] = r
        mask[i, p_width - len(p) : p_width + len(r)] = 1
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids, "responses": ids[:, p_width:]}


def per_row(model, rows, temperature=1.0):
    """The oracle: lists of each row's log-probs and entropies, differentiable; ``temperature`` a float or a list."""
    temperatures = temperature if isinstance(temperature, list) else [temperature] * len(rows)
    log_probs, entropies = [], []
    for (prompt, response), t in zip(rows, temperatures, strict=True):
        logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : len(prompt) - 1 + len(response)]
        logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32) / t
        log_p = logits.log_softmax(-1)
        log_probs.append(log_p.gather(-1, response[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return log_probs, entropies


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst_gradient(expected, got):
    """The largest difference over all parameters, against the largest gradient of any."""
    assert expected.keys() == got.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    return max(float((expected[name] - got[name]).abs().max()) for name in expected) / scale


def jagged(values):
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)


def verl_batch(rows, seed=0, temperature=1.0, **settings):
    """A list of (prompt, response) as the jagged TensorDict that verl's V1 worker hands its engine."""
    g = torch.Generator().manual_seed(seed)
    noise = lambda: jagged([torch.randn(len(r), generator=g) for _, r in rows])  # noqa: E731
    mask = jagged([torch.ones(len(r), dtype=torch.int64) for _, r in rows])
    data = TensorDict(
        {
            "input_ids": jagged([torch.cat(row) for row in rows]),
            "position_ids": jagged([torch.arange(len(p) + len(r)) for p, r in rows]),
            "prompts": jagged([p for p, _ in rows]),
            "responses": jagged([r for _, r in rows]),
            "response_mask": mask,
            "loss_mask": mask,
            "advantages": noise(),
            "old_log_probs": jagged([-4 + 0.1 * torch.randn(len(r), generator=g) for _, r in rows]),
            "ref_log_prob": jagged([-4 + 0.1 * torch.randn(len(r), generator=g) for _, r in rows]),
        },
        batch_size=len(rows),
    )
    defaults = {
        "temperature": temperature,
        "calculate_entropy": True,
        "use_remove_padding": True,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 4096,
        "micro_batch_size_per_gpu": 2,
        "use_fused_kernels": False,
        "global_batch_size": len(rows),
    }
    for key, value in (defaults | settings).items():
        data.set_non_tensor(key, value)
    return data
