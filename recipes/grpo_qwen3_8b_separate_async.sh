#!/usr/bin/env bash
# GRPO of Qwen3-8B on text-to-SQL, training and sampling at the same time: 8 GPUs each, of 80 GB, on two nodes.
#
#   python3 recipes/data/text_to_sql.py --source bird --out data/bird    # once; the script says where `bird` is from
#   ray start --head --port=6379                                         # on the first node
#   ray start --address=<its address>:6379                # on the other; recipes/cluster/start_ray.sh does both
#   recipes/grpo_qwen3_8b_separate_async.sh                              # prompts shared; once, on the head
#   STRATEGY=fsdp2 recipes/grpo_qwen3_8b_separate_async.sh               # veRL's own engine, to compare with
#
# One node with 8 GPUs, four each:
#
#   GPUS_PER_NODE=4 recipes/grpo_qwen3_8b_separate_async.sh actor_rollout_ref.rollout.n_gpus_per_node=4 \
#       actor_rollout_ref.actor.fsdp_config.optimizer_offload=True       # each GPU has twice the shard of 8
#
# With Slurm, whose nodes are trainer's and rollout's together:
#
#   sbatch --nodes=2 recipes/cluster/slurm.sh recipes/grpo_qwen3_8b_separate_async.sh trainer.nnodes=1
#
# NNODES and GPUS_PER_NODE are the trainer's. veRL's nccl backend needs CuPy (`pip install 'verl[cupy-cu130]'`). What differs from
# grpo_qwen3_8b_text_to_sql.sh stands here; variables and arguments are the same.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export OUT=${OUT:-outputs/grpo_qwen3_8b_separate_async_${STRATEGY:-zorro}} # checkpoints, logs

async=(
    # Trainer and rollout have GPUs of their own and work at the same time.
    trainer.v1.trainer_mode=separate_async
    # GPUs that only sample: nodes, and of each. Shared prompts make training shorter, not sampling: where the trainer
    # still waits (timing_s/gen), move GPUs from `trainer.n_gpus_per_node` here.
    actor_rollout_ref.rollout.nnodes=1
    actor_rollout_ref.rollout.n_gpus_per_node=8
    # Optimizer steps between two updates of the rollout's weights. The next line has to be this times the one after it.
    # Fewer keep rows younger, more update weights less often.
    trainer.v1.separate_async.parameter_sync_step=4
    # Prompts of a step, until the rollout has new weights.
    data.train_batch_size=256
    # Prompts of an optimizer step, which takes the next 64 that are answered in full. A multiple of the trainer's GPUs,
    # so that groups stay whole.
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    # Batches of `data.train_batch_size` prompts that are under way before the first step. 0: sampling waits for every
    # update of the weights; 1: the rollout is a batch ahead, and rows are a step old.
    trainer.v1.separate_async.num_warmup_batches=1
    # Trainer GPUs sample, too, while too few prompts are answered: worth its price where the trainer waits.
    trainer.v1.separate_async.hybrid_rollout.enable_switch=True
    # They train again when this part of a batch is there. veRL moves it with how long the trainer waited.
    trainer.v1.separate_async.hybrid_rollout.switch_threshold_ratio=0.4
    # Steps from the one that hands a prompt out to the one that trains on it, both counted; 2 is usual here. A prompt
    # that took longer is dropped, all rows of its group at once, and a new one takes its place.
    trainer.v1.sampler.max_off_policy_threshold=4
    # `wait` would wait for old prompts instead: none is lost, and the slowest are waited for.
    trainer.v1.sampler.max_off_policy_strategy=drop
    # How weights go to the rollout's GPUs: broadcast from the trainer's first.
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
    # Megabytes that go at once. Each GPU, trainer's and rollout's, has two buffers of this size meanwhile.
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1024
    # vLLM returns the log-prob of each token under the weights that drew it, which the correction below needs.
    actor_rollout_ref.rollout.calculate_log_probs=True
    # A row was drawn from older weights than those it is scored with: the first of its step, which the trainer sets
    # aside in host memory, 8.2 GB a GPU. Each token's loss is weighted by how much likelier it has become since ...
    algorithm.rollout_correction.rollout_is=token
    # ... twice at most, so that single tokens don't take over.
    algorithm.rollout_correction.rollout_is_threshold=2.0
)

exec "$here/grpo_qwen3_8b_text_to_sql.sh" "${async[@]}" "$@"
