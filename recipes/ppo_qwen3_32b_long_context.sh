#!/usr/bin/env bash
# PPO of Qwen3-32B on questions about long documents, with a critic from Qwen3-8B: 4 nodes, each with 8 GPUs of 141 GB
# (H200).
#
#   ray start --head --port=6379                          # on the first node
#   ray start --address=<its address>:6379                # on each other node; recipes/cluster/start_ray.sh does both
#
#   python3 recipes/data/long_context_qa.py --source docqa --out /shared/docqa --tokenizer Qwen/Qwen3-32B    # once
#   DATA=/shared/docqa OUT=/shared/ppo_32b recipes/ppo_qwen3_32b_long_context.sh    # on the head
#   STRATEGY=fsdp2 DATA=/shared/docqa ...                                  # veRL's own engines, to compare with
#
# All that is not said here is grpo_qwen3_32b_long_context.sh's, its variables and arguments included. A group of 8
# responses stays: with `rollout.n=1` there would be nothing to share.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

CRITIC_MODEL=${CRITIC_MODEL:-Qwen/Qwen3-8B}          # name, or folder by its full path; of the actor's tokenizer
export OUT=${OUT:-outputs/ppo_qwen3_32b_long_context_${STRATEGY:-zorro}} # checkpoints, logs

algorithm=(
    # Advantages per token, from the critic's values.
    algorithm.adv_estimator=gae
    # The reward at the end counts as much for the first token as for the last of 4096.
    algorithm.gamma=1.0
    # 1: advantages are rewards less values, without bias by a critic that is wrong. Below 1 a reward fades along the
    # response: at 0.95 nothing of it is left after a hundred tokens.
    algorithm.lam=1.0
)

critic=(
    # As the actor's; the two may differ.
    critic.strategy='${actor_rollout_ref.actor.strategy}'
    # A quarter of the actor's work, and enough to tell good answers from bad. With gradients and optimizer 16 bytes a
    # parameter, over 32 GPUs: 3.8 GB on each.
    critic.model.path="$CRITIC_MODEL"
    # Layers keep their input only, as the actor's.
    critic.model.enable_gradient_checkpointing=True
    # Ten times the actor's: the head starts from nothing, and values have to follow the policy.
    critic.optim.lr=1e-5
    # As the actor's, so that both have the same ranks, and groups lie whole on them for both.
    critic.fsdp.ulysses_sequence_parallel_size='${actor_rollout_ref.actor.ulysses_sequence_parallel_size}'
    # Tokens of a micro-batch per GPU, for values and for updates. As the actor's: a smaller model takes less memory.
    ++critic.ppo_infer_max_token_len_per_gpu='${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}'
    # The same for updates of veRL's legacy trainer (trainer.use_v1=False), which reads this one.
    critic.ppo_max_token_len_per_gpu='${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}'
    # Weights and optimizer stay on the GPU while others work there. True frees 0.9 GB of each GPU then ...
    critic.fsdp.param_offload=False
    # ... and this 1.9 GB, for copying in each step.
    critic.fsdp.optimizer_offload=False
    # The critic learns alone before this step, until its values are better than none.
    trainer.critic_warmup=5
    # Older checkpoints of it are removed, as the actor's. Each has 91 GB.
    trainer.max_critic_ckpt_to_keep=2
)

exec "$here/grpo_qwen3_32b_long_context.sh" "${algorithm[@]}" "${critic[@]}" "$@"
