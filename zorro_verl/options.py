"""The options a user can set, under ``actor_rollout_ref.actor.zorro``, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

CONFIG_KEY = "actor_rollout_ref.actor.zorro"


@dataclass(frozen=True)
class ZorroOptions:
    """How prompts are shared. The defaults are what plain ``actor.strategy=zorro`` gives.

    Args:
        attn_implementation: "auto" takes an explicit ``model.override_config.attn_implementation``, else torch's own
            flash attention ("sdpa"); "eager" is the dense reference, slow and for short batches;
            "flash_attention_2", "flash_attention_3" and "flash_attention_4" need their packages.
        use_split_attention: False shares projections, MLPs and head, and runs attention on the rows as they were.
        logits_optimization: "none" keeps all response logits, "compute" runs their softmax in chunks, "memory"
            projects in chunks and recomputes them in the backward. Same values and gradients.
        base_strategy: the FSDP version underneath, "fsdp2" or "fsdp".
        linear_attention: for hybrid models, no effect on others: "expand" scans the rows as they were, "fork" starts
            every response from its prompt's state. "auto" forks from 256 saved tokens on, with flash-linear-attention
            from 65536 on, for each further call that it takes. Same values and gradients, up to rounding.

    Raises:
        ValueError: a value outside its choices, with the config key.
    """

    attn_implementation: str = "auto"
    use_split_attention: bool = True
    logits_optimization: str = "none"
    base_strategy: str = "fsdp2"
    linear_attention: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in (
            (
                "attn_implementation",
                ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"),
            ),
            ("use_split_attention", (True, False)),
            ("logits_optimization", ("none", "compute", "memory")),
            ("base_strategy", ("fsdp2", "fsdp")),
            ("linear_attention", ("auto", "expand", "fork")),
        ):
            value = getattr(self, name)
            if type(value) is not type(choices[0]) or value not in choices:
                raise ValueError(f"{CONFIG_KEY}.{name}: expected one of {choices}, got {value!r}")
