#!/usr/bin/env bash
# PPO of Qwen3-8B on text-to-SQL, the critic from the same model: one node with 8 GPUs of 80 GB.
#
#   python3 recipes/data/text_to_sql.py --source bird --out data/bird    # once; the script says where `bird` is from
#   recipes/ppo_qwen3_8b_text_to_sql.sh                                  # actor and critic share prompts
#   STRATEGY=fsdp2 recipes/ppo_qwen3_8b_text_to_sql.sh                   # veRL's own engines, to compare with
#
# All that is not said here is grpo_qwen3_8b_text_to_sql.sh's, its variables and arguments included. A group of 8
# responses stays: with `rollout.n=1` there would be nothing to share.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export OUT=${OUT:-outputs/ppo_qwen3_8b_text_to_sql_${STRATEGY:-zorro}} # checkpoints, logs

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
    # The same model with a fresh head of one value: 16 bytes a parameter, over 8 GPUs 15.1 GB more on each.
    critic.model.path='${actor_rollout_ref.model.path}'
    # Layers keep their input only, as the actor's.
    critic.model.enable_gradient_checkpointing=True
    # Ten times the actor's: the head starts from nothing, and values have to follow the policy.
    critic.optim.lr=1e-5
    # As the actor's, so that both have the same ranks, and groups lie whole on them for both.
    critic.fsdp.ulysses_sequence_parallel_size='${actor_rollout_ref.actor.ulysses_sequence_parallel_size}'
    # Tokens of a micro-batch, for values and for updates. As the actor's: without logits it takes less memory.
    ++critic.ppo_infer_max_token_len_per_gpu='${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}'
    # The same for updates of veRL's legacy trainer (trainer.use_v1=False), which reads this one.
    critic.ppo_max_token_len_per_gpu='${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}'
    # Its weights and optimizer lie in host memory while others work: 91 GB on the node, for copying in each
    # step. Else vLLM would have 11 GB less of each GPU. This is for the weights ...
    critic.fsdp.param_offload=True
    # ... and this for the optimizer.
    critic.fsdp.optimizer_offload=True
    # The critic learns alone before this step, until its values are better than none.
    trainer.critic_warmup=5
    # Older checkpoints of it are removed, as the actor's. Each has 91 GB.
    trainer.max_critic_ckpt_to_keep=2
)

exec "$here/grpo_qwen3_8b_text_to_sql.sh" "${algorithm[@]}" "${critic[@]}" "$@"
