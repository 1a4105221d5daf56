"""The options, their checks, and the Hydra group that brings them from verl's command line to the engine."""

import dataclasses

import pytest

from zorro_verl.attention_kernels import ATTENTION_IMPLEMENTATIONS
from zorro_verl.log_probs import LOGITS_OPTIMIZATIONS
from zorro_verl.options import CONFIG_KEY, ZorroOptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_implementation", "flash"),
        ("attn_implementation", "SDPA"),
        ("attn_implementation", None),
        ("attn_implementation", ""),
        ("use_split_attention", "True"),
        ("use_split_attention", 1),
        ("use_split_attention", None),
        ("logits_optimization", "fused"),
        ("logits_optimization", None),
        ("logits_optimization", False),
        ("base_strategy", "zorro"),
        ("base_strategy", "megatron"),
        ("linear_attention", "chunk"),
    ],
)
def test_bad_values_name_the_config_key(name, value):
    with pytest.raises(ValueError) as error:
        ZorroOptions(**{name: value})
    message = str(error.value)
    assert message.startswith(f"actor_rollout_ref.actor.zorro.{name}: expected one of")
    assert message.endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("attn_implementation", ATTENTION_IMPLEMENTATIONS),
        ("use_split_attention", (True, False)),
        ("logits_optimization", LOGITS_OPTIMIZATIONS),
        ("base_strategy", ("fsdp2", "fsdp")),
        ("linear_attention", ("auto", "expand", "fork")),
    ],
)
def test_good_values(name, values):
    """All that the modules behind an option know, and nothing else."""
    for value in values:
        assert getattr(ZorroOptions(**{name: value}), name) == value


def test_options_are_frozen_and_no_others_exist():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZorroOptions().base_strategy = "fsdp"
    with pytest.raises(TypeError, match="atention"):
        ZorroOptions(atention="sdpa")


def compose(*overrides, group=True):
    """verl's own trainer config, as ``python -m verl.trainer.main_ppo`` composes it from these overrides."""
    import hydra

    ours = ["hydra.searchpath=[pkg://zorro_verl.configs]", "actor@actor_rollout_ref.actor=zorro_actor"]
    needed = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", [*(ours if group else []), *needed, *overrides])


def built(config):
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def test_the_group_gives_the_defaults():
    config = compose()
    assert config.actor_rollout_ref.actor.strategy == config.actor_rollout_ref.ref.strategy == "zorro"
    actor = built(config)
    assert type(actor).__name__ == "ZorroActorConfig"
    assert actor.zorro == ZorroOptions()
    assert actor.engine.strategy == "zorro"


def test_options_reach_the_engine():
    """verl hands an engine its engine config only."""
    chosen = {
        "attn_implementation": "eager",
        "use_split_attention": False,
        "logits_optimization": "memory",
        "base_strategy": "fsdp",
        "linear_attention": "fork",
    }
    actor = built(compose(*(f"{CONFIG_KEY}.{name}={value}" for name, value in chosen.items())))
    assert actor.engine.zorro == ZorroOptions(**chosen)


def test_the_group_lists_every_option_with_its_default():
    from omegaconf import OmegaConf

    listed = OmegaConf.to_container(compose().actor_rollout_ref.actor.zorro)
    assert listed.pop("_target_") == "zorro_verl.options.ZorroOptions"
    assert listed == dataclasses.asdict(ZorroOptions())


def test_the_group_changes_nothing_else_of_the_actor():
    """Everything that is verl's, defaults and overrides, is as without the group."""
    from omegaconf import OmegaConf

    override = "actor_rollout_ref.actor.optim.lr=3e-7"
    ours, verls = (
        OmegaConf.to_container(compose(override, group=group).actor_rollout_ref.actor) for group in (True, False)
    )
    ours.pop("zorro")
    assert {key for key in ours if ours[key] != verls[key]} == {"strategy", "_target_"}
    assert ours.keys() == verls.keys()
    assert ours["optim"]["lr"] == 3e-7


def test_a_bad_value_fails_when_verl_builds_the_config():
    """On the driver, before any worker starts."""
    config = compose(f"{CONFIG_KEY}.logits_optimization=fused")
    with pytest.raises(Exception, match=r"actor_rollout_ref\.actor\.zorro\.logits_optimization: expected one of"):
        built(config)


def test_a_misspelt_option_is_no_silent_default():
    with pytest.raises(Exception, match="logits_optimisation"):
        compose(f"{CONFIG_KEY}.logits_optimisation=memory")
    with pytest.raises(Exception, match="logits_optimisation"):
        built(compose(f"+{CONFIG_KEY}.logits_optimisation=memory"))


def test_strategy_alone_composes_too():
    """The one override that is enough; the defaults apply where the engine finds no options."""
    actor = built(compose("actor_rollout_ref.actor.strategy=zorro", group=False))
    assert actor.engine.strategy == "zorro"
    assert not hasattr(actor.engine, "zorro")
