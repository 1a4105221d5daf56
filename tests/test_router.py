"""Router logits and the balancing loss of patched mixture-of-experts models, against the plain model's own."""

import copy
from contextlib import nullcontext

import pytest
import tiny_models
import torch
from float64 import Float64
from test_models import shared_call
from tiny import batch_b0, gradients, padded_batch, per_row, shuffled, worst_gradient
from transformers import MixtralForCausalLM, Qwen3_5MoeForConditionalGeneration, Qwen3MoeForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_moe import modeling_qwen3_moe

from zorro_verl import Qwen3ModelOncePatcher
from zorro_verl.models import install, seam_of
from zorro_verl.qwen_model_patcher import Qwen3ModelPatcher

EXACT = 1e-11  # in float64 throughout
FLOAT64 = 5e-6
FLOAT32 = 2e-5
NAMES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
ROWS = shuffled(batch_b0(), 1)
BATCH = padded_batch(ROWS)
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
LABELS = IDS.masked_fill(MASK == 0, -100)


def pair(name="qwen3_moe", dtype=torch.float64, **config):
    """A patched model and the same, plain. The loss of the routers is as large as that of the labels."""
    plain = tiny_models.build(name, dtype, router_aux_loss_coef=0.5, **config)
    model = copy.deepcopy(plain)
    patcher = Qwen3ModelOncePatcher(model)
    patcher.patch()
    return model, plain, patcher


def both(model, plain, *args, mode=Float64, **arguments):
    with mode():
        return model(*args, **arguments), plain(*args, **{"use_cache": False} | arguments)


def check(got, expected, mask=MASK, tolerance=EXACT):
    """Both losses, and the router logits of every layer where the mask is 1."""
    assert list(got.keys()) == list(expected.keys())
    for name in ("loss", "aux_loss"):
        if name in expected:
            torch.testing.assert_close(got[name], expected[name], atol=tolerance, rtol=0, msg=lambda m, n=name: n + m)
    keep = mask.flatten().bool()
    assert len(got.router_logits) == len(expected.router_logits) > 0
    for a, b in zip(got.router_logits, expected.router_logits, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a[keep], b[keep], atol=tolerance, rtol=0)
        assert not a[~keep].any()


def check_gradients(model, plain, losses, tolerance=EXACT):
    for m, loss in zip((model, plain), losses, strict=True):
        m.zero_grad()
        loss.backward(retain_graph=True)
    assert worst_gradient(gradients(plain), gradients(model)) <= tolerance


@pytest.mark.parametrize("name", NAMES)
def test_losses_router_logits_and_gradients(name):
    """Once for the loss of the labels and the routers together, once for that of the routers alone."""
    model, plain, patcher = pair(name)
    got, expected = both(model, plain, IDS, MASK, labels=LABELS, output_router_logits=True)
    assert patcher.stats["token_ratio"] > 1.5
    check(got, expected)
    torch.testing.assert_close(got.logits[MASK == 1], expected.logits[MASK == 1], atol=EXACT, rtol=0)
    check_gradients(model, plain, (got.loss, expected.loss))
    check_gradients(model, plain, (got.aux_loss, expected.aux_loss))


def test_every_copy_of_a_prompt_weighs():
    """What a loss over the packed row would be is far from it, so the tests above can see the difference."""
    model, plain, _ = pair()
    seen = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    got, expected = both(model, plain, IDS, MASK, output_router_logits=True, mode=nullcontext)
    (packed,) = seen
    alone = modeling_qwen3_moe.load_balancing_loss_func((packed,), 4, 2)
    rows = modeling_qwen3_moe.load_balancing_loss_func(expected.router_logits[:1], 4, 2, MASK)
    assert packed.shape[0] == 51
    assert abs(alone - rows) > 1e-2
    check(got, expected, tolerance=FLOAT64)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_without_a_mask_every_token_counts(name):
    model, plain, _ = pair(name)
    ids = torch.cat([torch.tensor([3, 1, 4, 1, 5]).expand(4, 5), torch.arange(1, 17).view(4, 4)], 1)
    got, expected = both(model, plain, ids, labels=ids, output_router_logits=True)
    check(got, expected, torch.ones_like(ids))
    check_gradients(model, plain, (got.loss, expected.loss))


def test_one_mask_for_all_rows_and_a_row_without_a_token():
    model, plain, _ = pair()
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]).expand(4, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    with Float64():
        got = model(ids, mask, output_router_logits=True)
    mask = mask.repeat(4, 1)
    _, expected = both(model, plain, ids, mask, output_router_logits=True)
    check(got, expected, mask)
    mask[2] = 0
    check(*both(model, plain, ids, mask, output_router_logits=True), mask)


def test_several_sequences_in_one_row():
    model, plain, patcher = pair()
    sequences = [torch.cat(row) for row in ROWS]
    ids, positions = torch.cat(sequences)[None], torch.cat([torch.arange(len(x)) for x in sequences])[None]
    arguments = {"position_ids": positions, "use_cache": False, "labels": ids, "output_router_logits": True}
    got, expected = both(model, plain, ids, **arguments)
    assert patcher.stats["token_ratio"] > 1.5
    check(got, expected, torch.ones_like(ids))
    check_gradients(model, plain, (got.loss, expected.loss))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "qwen3_5_moe"])
@pytest.mark.parametrize("asked", [None, False, True])
def test_the_config_decides_when_the_call_does_not(name, asked):
    """With a vision tower the plain model returns router logits then, and no loss."""
    model, plain, _ = pair(name, output_router_logits=True)
    call = {} if asked is None else {"output_router_logits": asked}
    got, expected = both(model, plain, IDS, MASK, labels=LABELS, **call)
    assert ("router_logits" in expected) == (asked is not False)
    assert ("aux_loss" in expected) == (asked is True or (asked is None and name != "qwen3_5_moe"))
    if asked is False:
        assert list(got.keys()) == list(expected.keys())
        torch.testing.assert_close(got.loss, expected.loss, atol=EXACT, rtol=0)
    else:
        check(got, expected)


def test_the_labels_loss_alone_when_nobody_asks():
    model, plain, _ = pair()
    got, expected = both(model, plain, IDS, MASK, labels=LABELS)
    assert list(got.keys()) == list(expected.keys()) == ["loss", "logits"]
    torch.testing.assert_close(got.loss, expected.loss, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_the_models_own_numbers_in_the_loss(name):
    """Where the plain model reads them: a text model when it is built, one with a vision tower in every call."""
    model, plain, _ = pair(name)
    for m in (model, plain):
        m.config.get_text_config().router_aux_loss_coef = 7.0
    got, expected = both(model, plain, IDS, MASK, labels=LABELS, output_router_logits=True)
    check(got, expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_tuples_are_in_the_plain_models_order(name):
    model, plain, _ = pair(name)
    arguments = {"labels": LABELS, "output_router_logits": True, "output_hidden_states": True}
    got, expected = both(model, plain, IDS, MASK, return_dict=False, **arguments)
    assert [type(x) for x in got] == [type(x) for x in expected]
    shapes = [[x.shape for x in (values if isinstance(values, tuple) else (values,))] for values in (*got, *expected)]
    assert shapes[: len(got)] == shapes[len(got) :]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_temperature_leaves_the_routers_alone(name):
    model, plain, _ = pair(name)
    arguments = {"labels": LABELS, "output_router_logits": True}
    with Float64():
        got = model(IDS, MASK, temperature=0.5, **arguments)
        expected = plain(IDS, MASK, use_cache=False, **arguments)
        loss = plain.loss_function(expected.logits / 0.5, LABELS, tiny_models.VOCAB)
    check(got, type(expected)(**dict(expected) | {"loss": loss + 0.5 * expected.aux_loss}))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_a_call_with_a_cache_has_the_plain_models_loss(name):
    model, plain, patcher = pair(name)
    ids = torch.tensor([3, 1, 4, 1, 5, 9]).expand(4, 6)
    got, expected = both(model, plain, ids, labels=ids, output_router_logits=True, use_cache=True)
    assert patcher.stats["fallback"]["use_cache"] == 4
    assert expected.aux_loss is not None
    check(got, expected, torch.ones_like(ids))
    got, expected = both(model, plain, ids, labels=ids, output_router_logits=False, use_cache=True)
    assert "router_logits" not in got
    torch.testing.assert_close(got.loss, expected.loss, atol=EXACT, rtol=0)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_checkpointing_and_a_backward_after_the_block(name, reentrant):
    """Of the routers' loss alone; re-entrant layers record it without a gradient, in the plain model, too."""
    model, plain, patcher = pair(name)
    patcher.unpatch()
    losses = []
    for m in (model, plain):
        m.train()
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        m.enable_input_require_grads()
    with Qwen3ModelPatcher(model) as patcher:
        got = model(IDS, MASK, labels=LABELS, output_router_logits=True)
        assert patcher.stats["token_ratio"] > 1.5
    expected = plain(IDS, MASK, labels=LABELS, output_router_logits=True)
    check(got, expected, tolerance=FLOAT64)
    losses = (got.loss, expected.loss) if reentrant else (got.aux_loss, expected.aux_loss)
    assert got.aux_loss.requires_grad == expected.aux_loss.requires_grad == (not reentrant)
    for loss in losses:
        loss.backward()
    assert worst_gradient(gradients(plain), gradients(model)) <= FLOAT64
    assert seam_of(model) is None
    assert not model.model._forward_pre_hooks


def test_a_class_derived_from_the_models_own():
    """As FSDP2 makes them: the loss function stands beside a class further up."""
    model, plain, _ = pair()
    model.__class__ = type("Derived", (Qwen3MoeForCausalLM,), {"__module__": __name__})
    check(*both(model, plain, IDS, MASK, labels=LABELS, output_router_logits=True))


@pytest.mark.parametrize("clone", [False, True])
def test_unpatch_leaves_no_hook(clone):
    model, plain, patcher = pair()
    if clone:
        model = copy.deepcopy(model)
        patcher = Qwen3ModelOncePatcher(model)
    check(*both(model, plain, IDS, MASK, output_router_logits=True))
    patcher.unpatch()
    hooks = [
        {
            (name, key): len(value)
            for name, module in m.named_modules()
            for key, value in vars(module).items()
            if key.endswith(("_hooks", "_hooks_with_kwargs"))
        }
        for m in (model, plain)
    ]
    assert hooks[0] == hooks[1]
    assert vars(model.model).keys() == vars(plain.model).keys()


def test_a_forward_that_drops_router_logits_is_named(monkeypatch):
    """As veRL's class patch of models with a vision tower does."""
    model, _, _ = pair("qwen3_5_moe")

    def without_routers(self, input_ids=None, labels=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, **kwargs)[0]))

    monkeypatch.setattr(Qwen3_5MoeForConditionalGeneration, "forward", without_routers)
    assert model(IDS, attention_mask=MASK).logits.shape[:2] == IDS.shape
    with pytest.raises(ValueError, match=r"output_router_logits: expected router_logits from .*without_routers"):
        model(IDS, attention_mask=MASK, output_router_logits=True)


def test_dense_models_have_none():
    model = tiny_models.build("qwen3")
    Qwen3ModelOncePatcher(model).patch()
    assert not model.model._forward_pre_hooks
    with pytest.raises(ValueError, match="output_router_logits: a patched model takes no such argument"):
        model(IDS, MASK, output_router_logits=True)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_the_actors_call_records_nothing(name):
    """A config that asks for router logits costs it no memory: veRL's loss has no part for them."""
    plain = tiny_models.build(name, output_router_logits=True)
    model = copy.deepcopy(plain)
    install(model)
    values = shared_call(model, ROWS)
    assert not any(vars(m).get("_output_capturing_hooks_installed") for m in model.modules())
    for got, expected in zip(values, per_row(plain, ROWS), strict=True):
        torch.testing.assert_close(torch.cat(list(got)), torch.cat(expected), atol=FLOAT64, rtol=0)


def test_jitter_is_refused_in_training():
    model, plain, _ = pair("mixtral", router_jitter_noise=0.1)
    assert isinstance(model, MixtralForCausalLM)
    check(*both(model, plain, IDS, MASK, output_router_logits=True))
    with pytest.raises(ValueError, match="router_jitter_noise: expected 0 in training, got 0.1"):
        model.train()(IDS, MASK)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_arguments_of_the_loss(name):
    """A model with a vision tower hands its loss nothing but labels."""
    model, plain, _ = pair(name)
    arguments = {"labels": LABELS, "output_router_logits": True, "num_items_in_batch": 11}
    check(*both(model, plain, IDS, MASK, **arguments))
