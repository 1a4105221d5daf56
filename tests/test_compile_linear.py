"""A decoder layer with Gated DeltaNet under torch.compile: no graph break of ours, values and gradients as without.

The rule of transformers in torch is traced, and unrolls a loop over the tokens of a chunk: chunks are short here, or
the compiler would take most of a minute. flash-linear-attention's is not traced: a layer breaks there, ours or not.
"""

import functools

import pytest
import tiny_models
import torch
from test_compile import BATCHES, rows_of
from test_linear_attention import varlen_rule
from torch._dynamo.utils import counters
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from zorro_verl.layer_call import no_mask
from zorro_verl.mixers import linear_layers
from zorro_verl.models import install
from zorro_verl.packing import build_plan

# On a CPU the experts of transformers have a backward that AOTAutograd can't trace: the first layer does without.
MODELS = {"qwen3_next": {"mlp_only_layers": [0]}, "qwen3_5_text": {}}

short_chunks = functools.partial(torch_chunk_gated_delta_rule, chunk_size=4)


def like_fla(query, key, value, g, beta, cu_seqlens=None, **options):
    """The interface of flash-linear-attention's, closed to the compiler as that one is."""
    if cu_seqlens is None:
        return short_chunks(query, key, value, g=g, beta=beta, **options)
    return varlen_rule(query, key, value, g, beta, cu_seqlens=cu_seqlens, **options)


like_fla.__module__ = "fla.ops.gated_delta_rule.chunk"
like_fla = torch.compiler.disable(like_fla)


class Subject:
    """The first linear layer of a tiny model, by itself or compiled. Counts its graphs."""

    def __init__(self, name, rule, way=None):
        self.model = tiny_models.build(name, torch.float32, **MODELS[name])
        for _, mixer in linear_layers(self.model):
            mixer.chunk_gated_delta_rule = rule
        if way is not None:
            install(self.model, linear_attention=way)
        self.layer, _ = linear_layers(self.model)[0]
        self.graphs = 0

    def compile(self, **options):
        torch._dynamo.reset()
        counters.clear()
        return torch.compile(self.layer, backend=self._backend, **options)

    def _backend(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    def run(self, layer, plan, seed, **call):
        """The layer's output, and the gradients of its input and of every parameter, as the model calls it."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(1, plan.num_tokens, self.model.config.hidden_size, generator=generator).requires_grad_()
        weight = torch.randn(hidden.shape, generator=generator)
        positions = torch.arange(plan.num_tokens)[None]
        rotary = self.model.get_decoder().rotary_emb(hidden.detach(), positions)
        out = layer(hidden, position_embeddings=rotary, position_ids=positions, use_cache=False, **call)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), [hidden, *self.layer.parameters()])]

    def shared(self, layer, groups, seed):
        plan = build_plan(rows_of(groups, seed))
        mask = no_mask(plan.token_index)
        return self.run(layer, plan, seed, attention_mask=mask, zorro=self.model.forward._layer_call(plan))


def assert_close(expected, got):
    for a, b in zip(expected, got, strict=True):
        assert (a - b).abs().max() <= 2e-5 * max(1.0, float(a.abs().max()))


@pytest.mark.parametrize(
    ("name", "way"), [("qwen3_next", "fork"), ("qwen3_5_text", "fork"), ("qwen3_5_text", "expand")]
)
def test_a_layer_is_one_graph_with_the_same_values(name, way):
    subject = Subject(name, short_chunks, way)
    compiled = subject.compile(fullgraph=True, dynamic=False)
    groups = [(5, [3, 0, 2]), (3, [2])]
    assert_close(subject.shared(subject.layer, groups, 0), subject.shared(compiled, groups, 0))
    again = subject.shared(compiled, groups, 1)
    assert_close(subject.shared(subject.layer, groups, 1), again)
    assert subject.graphs == 1


def test_other_groups_break_and_compile_nothing_more():
    """With a rule that is not traced, as on a GPU: as many breaks as in the plain layer, and two compilations."""
    plain, subject = Subject("qwen3_5_text", like_fla), Subject("qwen3_5_text", like_fla, "fork")
    plain.run(plain.compile(), build_plan(rows_of(BATCHES[0], 0)), 0)
    breaks = sum(counters["graph_break"].values())
    compiled, graphs = subject.compile(), []
    for seed, groups in enumerate(BATCHES[:5]):
        assert_close(subject.shared(subject.layer, groups, seed), subject.shared(compiled, groups, seed))
        if not graphs:
            assert sum(counters["graph_break"].values()) == breaks > 0
            assert subject.graphs == plain.graphs
        graphs.append(subject.graphs)
    assert graphs[1:] == [2 * plain.graphs] * 4, "once as it comes, once for all sizes"
