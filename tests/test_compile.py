"""A decoder layer under torch.compile: one graph, the values of the layer that is not compiled, few compilations."""

import pytest
import torch
from tiny import flat_rows, tiny_model, tokens
from torch.library import opcheck

from zorro_verl.grouping import Rows
from zorro_verl.layer_call import no_mask
from zorro_verl.models import install
from zorro_verl.packing import build_plan

# Prompt length and response lengths of each group, ragged: rows that are alone, empty responses, one-token ones.
BATCHES = (
    [(7, [3, 4, 2]), (5, [2, 2, 6]), (4, [3])],
    [(9, [3, 4, 2, 5]), (5, [2, 0, 6]), (4, [3])],
    [(3, [1, 1, 1]), (11, [2, 3, 3, 3])],
    [(8, [3]), (4, [2])],
    [(30, [3, 4, 2] * 4), (5, [2, 2, 6]), (4, [3])],
    [(2, [3, 4, 2] * 4), (6, [2, 2, 6] * 2), (4, [3])],
    [(12, [1, 8, 8, 2])],
    [(6, [5, 4, 4]), (9, [5, 4, 4]), (3, [5, 4, 4]), (10, [2])],
    [(15, [3, 2, 9, 9, 4]), (1, [7, 7, 1])],
    [(20, [20, 20, 20]), (8, [4, 3, 3]), (2, [1]), (5, [5])],
)
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


class Compiled:
    """The first layer of a tiny model, compiled whole: a break in its graph is an error. Counts its compilations."""

    def __init__(self, model_type, attention="sdpa", split=True, **config):
        self.model = tiny_model(model_type, torch.float32, **config)
        install(self.model, attn_implementation=attention, use_split_attention=split)
        self.layer = self.model.model.layers[0]
        self.graphs = 0
        torch._dynamo.reset()
        self.compiled = torch.compile(self.layer, fullgraph=True, backend=self._backend)

    def _backend(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    def run(self, layer, rows: Rows, seed):
        """The layer's output, and the gradients of its input and of every parameter."""
        plan = build_plan(rows)
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(1, plan.num_tokens, self.model.config.hidden_size, generator=generator).requires_grad_()
        weight = torch.randn(hidden.shape, generator=generator)
        positions = plan.pack(rows.position_ids)[None]
        out = layer(
            hidden,
            attention_mask=no_mask(hidden),
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(hidden, positions),
            use_cache=False,
            zorro=self.model.forward._layer_call(plan),
        )
        parameters = list(self.layer.parameters())
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), [hidden, *parameters])]


def rows_of(groups, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for prompt_len, response_lens in groups:
        prompt = tokens(prompt_len, generator)
        rows += [(prompt, tokens(length, generator)) for length in response_lens]
    return flat_rows(rows)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        pytest.param("qwen3", {}, id="qwen3"),
        pytest.param("qwen3", {"split": False}, id="qwen3-rows"),
        pytest.param("qwen3", {"attention": "eager"}, id="qwen3-eager"),
        pytest.param("qwen3", WINDOWED, id="qwen3-window"),
        pytest.param("qwen3", WINDOWED | {"split": False}, id="qwen3-window-rows"),
        pytest.param("mistral", {"sliding_window": 4}, id="mistral"),
    ],
)
def test_a_layer_is_one_graph_with_the_same_values(model_type, settings):
    subject = Compiled(model_type, **settings)
    for seed, groups in enumerate(BATCHES):
        rows = rows_of(groups, seed)
        expected, got = subject.run(subject.layer, rows, seed), subject.run(subject.compiled, rows, seed)
        for a, b in zip(expected, got, strict=True):
            assert (a - b).abs().max() <= 2e-5 * max(1.0, float(a.abs().max())), groups
    assert 1 <= subject.graphs <= 5, f"{subject.graphs} compilations for {len(BATCHES)} batches"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [BATCHES[0], [(5, [3])], [(4, [2, 2, 2])]], ids=["ragged", "alone", "equal"])
def test_the_operators_are_what_a_graph_takes_them_for(groups, dtype):
    """Shapes, dtypes and strides that a compiled graph relies on, and a gradient of the same."""
    forest = build_plan(rows_of(groups, 0)).forest
    generator = torch.Generator().manual_seed(0)
    draw = lambda heads: torch.randn(forest.num_tokens, heads, 8, generator=generator).to(dtype)  # noqa: E731
    q, k, v, grad = draw(4), draw(2), draw(2), draw(4)
    for window in (None, 3):
        settings = (list(forest.tables(window)), 0.3, "sdpa")
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        opcheck(torch.ops.zorro_verl.attention.default, (*leaves, *settings))
        out, lse = torch.ops.zorro_verl.attention(q, k, v, *settings)
        opcheck(torch.ops.zorro_verl.attention_backward.default, (grad, q, k, v, out, lse, *settings))
