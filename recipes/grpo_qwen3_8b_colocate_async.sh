#!/usr/bin/env bash
# GRPO of Qwen3-8B on text-to-SQL without waiting for the last response: one node with 8 GPUs of 80 GB.
#
#   python3 recipes/data/text_to_sql.py --source bird --out data/bird    # once; the script says where `bird` is from
#   recipes/grpo_qwen3_8b_colocate_async.sh                              # prompts shared
#   STRATEGY=fsdp2 recipes/grpo_qwen3_8b_colocate_async.sh               # veRL's own engine, to compare with
#
# The same GPUs sample and train, in turns. A step trains on the first 256 prompts that are answered in full; the
# responses that are still running are stopped, and go on from where they are under the next weights. What differs from
# grpo_qwen3_8b_text_to_sql.sh stands here; variables and arguments are the same.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export OUT=${OUT:-outputs/grpo_qwen3_8b_colocate_async_${STRATEGY:-zorro}} # checkpoints, logs

async=(
    # Trainer and rollout take turns on the same GPUs, and no step waits for its slowest response.
    trainer.v1.trainer_mode=colocate_async
    # Batches of `data.train_batch_size` prompts that are under way before the first step adds its own. With 1 the step
    # after has most of its answers already. More hides longer responses better, and makes rows older.
    trainer.v1.colocate_async.num_warmup_batches=1
    # Steps from the one that hands a prompt out to the one that trains on it, both counted; 2 is usual here. A prompt
    # that took longer is dropped, all rows of its group at once, and a new one takes its place.
    trainer.v1.sampler.max_off_policy_threshold=4
    # `wait` would wait for old prompts instead: none is lost, and the slowest are waited for.
    trainer.v1.sampler.max_off_policy_strategy=drop
    # vLLM returns the log-prob of each token under the weights that drew it, which the correction below needs.
    actor_rollout_ref.rollout.calculate_log_probs=True
    # A row was drawn from older weights than those it is scored with before training. Each token's loss is weighted by
    # how much likelier it has become since ...
    algorithm.rollout_correction.rollout_is=token
    # ... twice at most, so that single tokens don't take over.
    algorithm.rollout_correction.rollout_is_threshold=2.0
)

exec "$here/grpo_qwen3_8b_text_to_sql.sh" "${async[@]}" "$@"
