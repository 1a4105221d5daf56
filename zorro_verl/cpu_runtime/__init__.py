"""What verl lacks to run its own trainer on a CPU: a platform, the stock engine, and a rollout server.

    python -m verl.trainer.main_ppo ... trainer.device=cpu \\
        actor_rollout_ref.actor.strategy=zorro \\
        actor_rollout_ref.rollout.name=hf

`trainer.device=cpu` is the choice; `VERL_PLATFORM=cpu` in the environment is the same choice. Without either, nothing
in here is loaded and verl looks for an accelerator as ever, on a driver that has none too. A run that chose the CPU

* takes `strategy=fsdp2` (verl's own engine) or `zorro`, critics too; `fsdp` is a ValueError that names `fsdp2`;
* starts Ray with `trainer.n_gpus_per_node` logical slots, one a worker process, and tells every worker its platform. To
  join a cluster, start its nodes with `ray start --num-gpus=<slots>`;
* gets `attn_implementation=sdpa` where the config names none, and no `torch.compile`;
* generates with `rollout.name=hf`: the Hugging Face model itself in `rollout.dtype`, each prompt computed once, weights
  taken from the actor in every step, log-probabilities returned, every rollout drawn from its own seed. A run is
  repeatable by `rollout.seed`; `replay` has the sampler that keeps the rows in order too;
* may be asynchronous: `trainer_mode=colocate_async`, or `separate_async` with `rollout.checkpoint_engine.backend=gloo`.

| module | job |
|---|---|
| `hooks` | which of verl's modules are extended, and why |
| `run` | looks at the config of a run before Ray starts |
| `platform`, `device_module` | verl's platform "cpu" |
| `stock` | verl's FSDP2 engine and critic on the CPU |
| `rollout`, `server`, `weights` | the replica, its server process, and the way of the weights into it |
| `checkpoint_engine` | the way of the weights to servers in slots of their own |
| `generation`, `seeding`, `routing` | shared prompts, seeded draws, siblings to one server |
| `replay` | replay buffers with a short poll |
"""
