#!/usr/bin/env bash
# PPO of Qwen3-0.6B on GSM8K, the critic from the same model: one GPU with 80 GB.
#
#   python3 recipes/data/gsm8k.py --source gsm8k --out data/gsm8k    # once; the script says where `gsm8k` is from
#   recipes/ppo_qwen3_0.6b_gsm8k.sh                                  # actor and critic share prompts
#   STRATEGY=fsdp2 recipes/ppo_qwen3_0.6b_gsm8k.sh                   # veRL's own engines, to compare with
#
# All that is not said here is grpo_qwen3_0.6b_gsm8k.sh's, its variables and arguments included. A group of 8 responses
# stays: with `rollout.n=1` there would be nothing to share.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export OUT=${OUT:-outputs/ppo_qwen3_0.6b_gsm8k_${STRATEGY:-zorro}} # checkpoints, logs

algorithm=(
    # Advantages per token, from the critic's values.
    algorithm.adv_estimator=gae
    # The reward at the end counts as much for the first token as for the last.
    algorithm.gamma=1.0
    # 1: advantages are rewards less values, without bias by a critic that is wrong. Below 1, 0.95 for instance, they
    # vary less.
    algorithm.lam=1.0
)

critic=(
    # As the actor's; the two may differ.
    critic.strategy='${actor_rollout_ref.actor.strategy}'
    # The same model with a fresh head of one value: 10 GB more of weights, gradients and optimizer.
    critic.model.path='${actor_rollout_ref.model.path}'
    # Layers keep their input only, as the actor's.
    critic.model.enable_gradient_checkpointing=True
    # Ten times the actor's: the head starts from nothing, and values have to follow the policy.
    critic.optim.lr=1e-5
    # Tokens of a micro-batch, for values and for updates. As the actor's: without logits it takes less memory.
    ++critic.ppo_infer_max_token_len_per_gpu='${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}'
    # The same for updates of veRL's legacy trainer (trainer.use_v1=False), which reads this one.
    critic.ppo_max_token_len_per_gpu='${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}'
    # Weights and optimizer stay on the GPU while others work there. True frees 2.4 GB of it then ...
    critic.fsdp.param_offload=False
    # ... and this 4.8 GB, for copying in each step.
    critic.fsdp.optimizer_offload=False
    # The critic learns alone before this step, until its values are better than none.
    trainer.critic_warmup=5
    # Older checkpoints of it are removed, as the actor's. Each has 7 GB.
    trainer.max_critic_ckpt_to_keep=2
)

exec "$here/grpo_qwen3_0.6b_gsm8k.sh" "${algorithm[@]}" "${critic[@]}" "$@"
