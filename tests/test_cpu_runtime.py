"""The CPU runtime: seeded generation over shared prompts, weights, and how a run chooses it."""

import pytest
import tiny_models
import torch
from fresh_process import run_python
from tiny import tiny_model

from zorro_verl.cpu_runtime.generation import PromptSharingGenerator, Request, Sampling, draw
from zorro_verl.cpu_runtime.seeding import request_seed, rollout_seed, uniforms
from zorro_verl.cpu_runtime.weights import load_weights

END = 3
PROMPTS = [(5, 9, 17, 4, 40, 11, 8), (7,), (12, 12, 30), (5, 9, 17, 4, 40, 11, 9)]
DRAWN = Sampling()
GREEDY = Sampling(temperature=0)


def generator(dtype=torch.float32, kept_tokens=10_000, **config):
    return PromptSharingGenerator(tiny_model(dtype=dtype, **config), [END], kept_tokens)


def requests(sampling=DRAWN, max_tokens=9, siblings=4):
    return [Request(prompt, max_tokens, seed, sampling) for seed in range(siblings) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7), Sampling(top_k=5), Sampling(top_p=0.8, temperature=1.3), GREEDY],
    ids=str,
)
def test_a_request_draws_the_same_tokens_in_any_company(sampling):
    asked = requests(sampling)
    together = generator().generate(asked)
    assert len({tuple(c.token_ids) for c in together}) > len(PROMPTS) or sampling == GREEDY
    engine = generator()
    order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(0)).tolist()
    for start in range(0, len(order), 3):
        chunk = order[start : start + 3]
        for index, completion in zip(chunk, engine.generate([asked[i] for i in chunk]), strict=True):
            assert completion.token_ids == together[index].token_ids
            assert completion.log_probs == pytest.approx(together[index].log_probs, abs=1e-5)


def test_different_samplings_in_one_batch_do_not_mix():
    mixed = [*requests(GREEDY), *requests(Sampling(top_k=2)), *requests(max_tokens=2)]
    apart = [
        c
        for part in (requests(GREEDY), requests(Sampling(top_k=2)), requests(max_tokens=2))
        for c in generator().generate(part)
    ]
    assert [c.token_ids for c in generator().generate(mixed)] == [c.token_ids for c in apart]


def test_seed_prompt_and_position_decide_the_draw():
    engine = generator()
    first, same, other = engine.generate([Request(PROMPTS[0], 9, seed) for seed in (1, 1, 2)])
    assert first == same
    assert first.token_ids != other.token_ids
    assert request_seed(1, (4, 5)) != request_seed(1, (4, 6)) != request_seed(2, (4, 6))
    assert rollout_seed(42, 1, False, 0, 0, 11) != rollout_seed(42, 11, False, 0, 0, 1)
    assert torch.equal(uniforms(7, 100)[:13], uniforms(7, 13))


def test_a_shorter_limit_cuts_the_same_completion():
    long = generator().generate(requests(max_tokens=9))
    short = generator().generate([*requests(max_tokens=4), Request((1, 2), 9, 0)])[:-1]
    assert [c.token_ids[:4] for c in long] == [c.token_ids for c in short]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_is_the_models_own_generate(attention):
    engine = generator(torch.float64)
    engine.model.set_attn_implementation(attention)
    completions = engine.generate([Request(prompt, 12, 0, GREEDY) for prompt in PROMPTS for _ in range(2)])
    for prompt, completion in zip(PROMPTS, completions[::2], strict=True):
        own = engine.model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=END, pad_token_id=0
        )
        assert completion.token_ids == own[0, len(prompt) :].tolist()
    assert [c.token_ids for c in completions[::2]] == [c.token_ids for c in completions[1::2]]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.5), Sampling(top_k=4, temperature=2.0), Sampling(top_p=0.6)],
    ids=str,
)
def test_log_probs_are_the_models_own_under_the_distribution_drawn_from(sampling):
    engine = generator(torch.float64)
    for request, completion in zip(requests(sampling), engine.generate(requests(sampling)), strict=True):
        row = torch.tensor([[*request.prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = engine.model(row).logits[0, len(request.prompt) - 1 : -1].float()
        if sampling.temperature != 1:
            logits = logits / sampling.temperature
        if sampling.top_k > 0:
            logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
        if sampling.top_p < 1:
            ordered, index = logits.softmax(-1).sort(descending=True)
            outside = ordered.cumsum(-1) - ordered >= sampling.top_p
            logits[outside.gather(1, index.argsort(1))] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_siblings_have_recurrent_states_of_their_own(name):
    engine = PromptSharingGenerator(tiny_models.build(name), [END], kept_tokens=10_000)
    for _ in range(2):  # the second time from kept states
        completions = engine.generate(requests())
        assert len({tuple(completion.token_ids) for completion in completions}) == len(completions)
        for request, completion in zip(requests(), completions, strict=True):
            row = torch.tensor([[*request.prompt, *completion.token_ids]])
            with torch.no_grad():
                log_p = engine.model(row).logits[0, len(request.prompt) - 1 : -1].float().log_softmax(-1)
            own = log_p.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert completion.log_probs == pytest.approx(own.tolist(), abs=1e-5)


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0, -30.0]).expand(20_000, -1)
    numbers = torch.stack([uniforms(request_seed(seed, (1,)), 1) for seed in range(20_000)])[:, 0]
    chosen, log_probs = draw(logits, numbers)
    share = torch.bincount(chosen, minlength=5) / len(chosen)
    assert torch.allclose(share, logits[0].softmax(-1), atol=0.012)  # three standard deviations
    assert share[2] == 0
    assert torch.equal(log_probs, logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0])


def test_numbers_at_the_ends_of_the_interval_draw_possible_tokens():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).repeat(2, 1)
    chosen, _ = draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert chosen.tolist() == [1, 2]


def test_a_completion_ends_with_the_end_token_unless_it_is_ignored():
    engine = generator()
    completions = engine.generate(requests(max_tokens=60, siblings=8))
    ended = [c for c in completions if END in c.token_ids]
    assert 0 < len(ended)
    assert all(c.token_ids.index(END) == len(c.token_ids) - 1 for c in ended)
    assert all(len(c.token_ids) == 60 for c in completions if END not in c.token_ids)
    assert all(len(c.log_probs) == len(c.token_ids) for c in completions)
    through = engine.generate(requests(Sampling(ignore_eos=True), max_tokens=60, siblings=8))
    assert all(len(c.token_ids) == 60 for c in through)
    for completion, longer in zip(completions, through, strict=True):
        assert longer.token_ids[: len(completion.token_ids)] == completion.token_ids


def count_tokens(engine):
    """The number of tokens of each forward call, in a list that grows."""
    calls = []
    engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((kwargs.get("input_ids", args[0] if args else None)).numel()),
        with_kwargs=True,
    )
    return calls


def test_a_prompt_is_computed_once_until_the_weights_change():
    engine = generator()
    calls = count_tokens(engine)
    engine.generate(requests(max_tokens=1))
    assert calls == [len(prompt) for prompt in PROMPTS]  # the first token needs no further call
    engine.generate(requests(max_tokens=1, siblings=7))
    assert len(calls) == len(PROMPTS)
    engine.forget_prompts()
    engine.generate(requests(max_tokens=1))
    assert len(calls) == 2 * len(PROMPTS)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_a_generation_that_is_stopped_has_what_was_drawn(name):
    model = tiny_model() if name == "qwen3" else tiny_models.build(name)
    engine = PromptSharingGenerator(model, [END], kept_tokens=10_000)
    asked = requests(max_tokens=9)
    whole = engine.generate(asked)
    assert {len(c.token_ids) for c in whole} > {9}, "some have to end early for this test"
    calls = count_tokens(engine)
    for steps in range(4):
        engine.forget_prompts()
        calls.clear()
        stopped = engine.generate(asked, lambda: len(calls) >= len(PROMPTS) + steps)  # noqa: B023
        assert len(calls) == len(PROMPTS) + steps
        for part, all_of_it in zip(stopped, whole, strict=True):
            assert part.token_ids == all_of_it.token_ids[: steps + 1]
            assert part.log_probs == pytest.approx(all_of_it.log_probs[: steps + 1], abs=1e-5)
            assert part.finished == (len(all_of_it.token_ids) <= steps + 1)
    calls.clear()
    engine.forget_prompts()
    nothing = engine.generate(asked, lambda: len(calls) >= 2)
    assert len(calls) == 2
    assert {(len(c.token_ids), c.finished) for c in nothing} == {(0, False)}


def test_a_step_feeds_one_token_a_sibling():
    engine = generator()
    calls = count_tokens(engine)
    engine.generate(requests(Sampling(ignore_eos=True), max_tokens=3, siblings=5))
    assert calls[len(PROMPTS) :] == [5 * len(PROMPTS)] * 2


def test_the_oldest_prompts_are_dropped_over_the_budget():
    engine = generator(kept_tokens=sum(map(len, PROMPTS[1:])))
    calls = count_tokens(engine)
    engine.generate(requests(max_tokens=1))
    engine.generate([Request(prompt, 1, 0) for prompt in PROMPTS[1:]])
    assert len(calls) == len(PROMPTS)
    engine.generate([Request(PROMPTS[0], 1, 0)])
    assert len(calls) == len(PROMPTS) + 1


def test_new_weights_are_the_ones_that_generate():
    engine, other = generator(), generator(seed=1)
    before = engine.generate(requests())
    load_weights(engine.model, other.model.state_dict())
    engine.forget_prompts()
    assert engine.generate(requests()) == other.generate(requests()) != before


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "mixtral", "qwen3_next", "qwen3_5_moe_text"])
def test_experts_arrive_one_by_one(model_type):
    """As verl's own engine sends them, for vLLM; a matrix that doesn't come is named."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    model, other = (tiny_models.build(model_type, torch.float32, seed=seed) for seed in (0, 1))
    sent = dict(unfuse_moe_params(other.state_dict().items(), model_type))
    assert any(".experts.0." in name for name in sent)
    load_weights(model, sent)
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    del sent[next(name for name in sent if ".experts.1.up_proj" in name)]
    with pytest.raises(ValueError, match=r"experts.0.gate_proj|experts.gate_up_proj"):
        load_weights(model, sent)


@pytest.mark.parametrize("names", ["both", "embedding", "head"])
def test_tied_embeddings_take_the_weights_under_either_name(names):
    model, other = tiny_model(tie_word_embeddings=True), tiny_model(tie_word_embeddings=True, seed=1)
    weights = other.state_dict()
    if names == "embedding":
        del weights["lm_head.weight"]
    if names == "head":
        del weights["model.embed_tokens.weight"]
    load_weights(model, weights)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_that_do_not_fit_are_refused():
    weights = tiny_model(tie_word_embeddings=True).state_dict()
    tied = tiny_model(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="no weights for 1 tensors.*model.norm.weight"):
        load_weights(tied, {name: weight for name, weight in weights.items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match="lora.merge=True"):
        load_weights(tied, weights | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="ties lm_head.weight to model.embed_tokens.weight.*two different"):
        load_weights(tied, weights | {"lm_head.weight": weights["lm_head.weight"] + 1})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty must be 1.0, got 1.1"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_sampling_parameters_that_cannot_be_honoured_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        Sampling.from_verl({"temperature": 1.0, "top_p": 1.0, "logprobs": True, **params})


def test_requests_without_a_prompt_or_without_room_are_refused():
    with pytest.raises(ValueError, match="at least one token"):
        Request((), 4, 0)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        Request((1,), 0, 0)


def test_layers_without_keys_and_values_of_all_tokens_are_refused():
    engine = generator(model_type="mistral", sliding_window=4)
    with pytest.raises(ValueError, match="mistral has layers of another kind.*rollout.name"):
        engine.generate(requests())


CHOSEN_BY_ENVIRONMENT = """
    import os, tempfile
    import verl
    from verl.plugin.platform import get_platform
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group_ray
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    assert get_platform().device_name == "cpu" and get_platform().ray_resource_name() == "GPU"
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "DIST_INIT_METHOD": f"file://{tempfile.mktemp()}"}
    initialize_global_process_group_ray()
    import torch
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total == 1 and "gloo" in str(torch.distributed.get_backend_config())
    destroy_global_process_group()

    for model_type in ("language_model", "value_model"):
        engine = EngineRegistry.get_engine_cls(model_type, "fsdp2")
        assert engine.__module__ == "verl.workers.engine.fsdp.transformer_impl", engine
        try:
            EngineRegistry.new(model_type, "fsdp", model_config=None)
            raise AssertionError("fsdp was built")
        except ValueError as error:
            assert "actor_rollout_ref.actor.strategy=fsdp2" in str(error), error
    assert get_rollout_class("hf").__name__ == "HFWeightSender"
    assert get_rollout_replica_class("hf").__name__ == "HFReplica"
    from verl.checkpoint_engine import CheckpointEngineRegistry
    assert CheckpointEngineRegistry.get("gloo").__name__ == "GlooCheckpointEngine"
    from verl.utils.flops_counter import get_device_flops
    assert 0 < get_device_flops() < float("inf")
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager as Manager
    Manager.load_rng_state(Manager.get_rng_state())
    print("CHECKED")
"""


def test_the_environment_chooses_the_runtime():
    output = run_python(CHOSEN_BY_ENVIRONMENT, VERL_PLATFORM="cpu")
    assert "CHECKED" in output
    assert "could not" not in output, output


CHOSEN_BY_CONFIG = """
    import os
    import hydra
    from omegaconf import OmegaConf, open_dict
    from verl.trainer import main_ppo
    from verl.plugin.platform import get_platform

    hydra.initialize_config_module("verl.trainer.config", version_base=None)

    def prepared(*overrides):
        config = hydra.compose("ppo_trainer", ["trainer.device=cpu", *overrides])
        main_ppo.auto_set_device(config)
        return config

    def refusal(*overrides):
        try:
            prepared(*overrides)
        except ValueError as error:
            return str(error)
        raise AssertionError(f"{overrides} was not refused")

    # Refused before anything is changed: verl's default strategy, and what has no CPU engine.
    assert "actor_rollout_ref.actor.strategy=fsdp2" in refusal()
    assert "critic.strategy=fsdp2" in refusal("actor_rollout_ref.actor.strategy=fsdp2")
    grpo = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.strategy=fsdp2", "trainer.n_gpus_per_node=2")
    assert "megatron" in refusal(*grpo, "actor_rollout_ref.actor.strategy=megatron")
    assert get_platform().device_name == "cuda" and "VERL_PLATFORM" not in os.environ

    config = prepared(*grpo)
    ray = config.ray_kwargs.ray_init
    assert get_platform().device_name == "cpu"
    assert os.environ["VERL_PLATFORM"] == ray.runtime_env.env_vars.VERL_PLATFORM == "cpu"
    assert ray.num_gpus == 2 and ray.num_cpus >= 18 and ray.include_dashboard is False, ray
    assert config.trainer.device == "cpu"
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "sdpa"
    assert not config.actor_rollout_ref.actor.fsdp_config.use_torch_compile
    assert not config.actor_rollout_ref.ref.fsdp_config.use_torch_compile
    assert OmegaConf.is_struct(config)

    # Rollouts of their own have slots of their own, and weights need a way between processes of CPUs.
    separate = (
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=3",
    )
    assert "checkpoint_engine.backend must be gloo, got naive" in refusal(*grpo, *separate)
    backend = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    ray = prepared(*grpo, *separate, f"{backend}=gloo").ray_kwargs.ray_init
    assert ray.num_gpus == 5 and ray.num_cpus >= 27, ray
    prepared(*grpo, *separate, f"{backend}=mine", f"{backend[:-8]}.custom_backend_module=my.module")

    # What the user has set stays.
    config = prepared(
        *grpo,
        "ray_kwargs.ray_init.num_cpus=5",
        "+ray_kwargs.ray_init.num_gpus=3",
        "+ray_kwargs.ray_init.include_dashboard=True",
        "+ray_kwargs.ray_init.runtime_env.env_vars={MINE:'1'}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    )
    ray = config.ray_kwargs.ray_init
    assert (ray.num_cpus, ray.num_gpus, ray.include_dashboard) == (5, 3, True), ray
    assert OmegaConf.to_container(ray.runtime_env.env_vars) == {"MINE": "1", "VERL_PLATFORM": "cpu"}
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "eager"

    # `ray.init` takes no resources when it joins a cluster.
    ray = prepared(*grpo, "+ray_kwargs.ray_init.address=127.0.0.1:6379").ray_kwargs.ray_init
    assert ray.get("num_gpus") is None and ray.num_cpus is None and "include_dashboard" not in ray, ray
    assert ray.runtime_env.env_vars.VERL_PLATFORM == "cpu"

    # The environment alone is enough.
    config = hydra.compose("ppo_trainer", [*grpo])
    main_ppo.auto_set_device(config)
    assert config.trainer.device == "cpu" and config.ray_kwargs.ray_init.num_gpus == 2
    print("CHECKED")
"""


def test_the_config_chooses_the_runtime():
    output = run_python(CHOSEN_BY_CONFIG)
    assert "CHECKED" in output
    assert "could not" not in output, output
    for said in ("num_gpus=2 logical slots", "attn_implementation=sdpa", "use_torch_compile=False"):
        assert said in output, output
