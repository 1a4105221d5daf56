#!/usr/bin/env bash
# GRPO of Qwen3-0.6B on GSM8K: one GPU with 80 GB.
#
#   python3 recipes/data/gsm8k.py --source gsm8k --out data/gsm8k    # once; the script says where `gsm8k` is from
#   recipes/grpo_qwen3_0.6b_gsm8k.sh                                 # prompts shared
#   STRATEGY=fsdp2 recipes/grpo_qwen3_0.6b_gsm8k.sh                  # veRL's own engine, to compare with
#
# Arguments are handed to veRL behind those below; the last one of a key counts: trainer.total_epochs=1
set -euo pipefail

STRATEGY=${STRATEGY:-zorro}                          # zorro | fsdp2
MODEL=${MODEL:-Qwen/Qwen3-0.6B}                      # name, or folder by its full path
DATA=$(realpath -m "${DATA:-data/gsm8k}")            # train.parquet and validation.parquet
OUT=$(realpath -m "${OUT:-outputs/grpo_qwen3_0.6b_gsm8k_$STRATEGY}") # checkpoints, logs
PYTHON=${PYTHON:-python3}                            # the Python that has veRL

# Lengths are in tokens. A group is a prompt and its 8 responses: at most 512 + 8 x 1024 = 8704 packed tokens.
data=(
    # Parquet files in veRL's format, made by the preparation above.
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/validation.parquet"
    # Prompts in a step, each answered `rollout.n` times: 2048 rows. Fewer make steps shorter and advantages noisier.
    data.train_batch_size=256
    # A question with the instruction has 60 to 300.
    data.max_prompt_length=512
    # An answer without thinking has 100 to 400; a longer one is cut and scores 0. Thinking (below) needs 4096.
    data.max_response_length=1024
    # Leaves out what is longer than max_prompt_length ...
    data.filter_overlong_prompts=True
    # ... and stops, should there be any left, instead of cutting a question.
    data.truncation=error
    # Qwen3's template: no thinking, as GSM8K is solved in a few lines.
    ++data.apply_chat_template_kwargs.enable_thinking=False
    # The order of the prompts is the same in every run, so that strategies can be compared step by step.
    data.seed=1
)

algorithm=(
    # An answer's advantage is its reward against those of its group: mean 0, deviation 1.
    algorithm.adv_estimator=grpo
    # KL to the reference stands in the loss (`use_kl_loss`), not in the reward.
    algorithm.use_kl_in_reward=False
)

actor=(
    # Reference policy and its options follow the actor's.
    actor_rollout_ref.actor.strategy="$STRATEGY"
    # Weights in float32 with bfloat16 mixed precision, as veRL does by default: 16 bytes a parameter, 10 GB here.
    actor_rollout_ref.model.path="$MODEL"
    # Rows are packed without padding. zorro does so in any case; fsdp2 does it with this.
    actor_rollout_ref.model.use_remove_padding=True
    # No logits are kept, which would take 41 GiB for the budget below: logits_optimization=memory in zorro, veRL's
    # fused kernels in fsdp2.
    actor_rollout_ref.model.use_fused_kernels=True
    # Layers keep their input only and are computed again in the backward: a third more work, 4 GiB instead of 63. False
    # is faster where memory allows it: 32 GiB with a budget of 16384 (estimates).
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    # Usual for full fine-tuning with GRPO; constant, as veRL's default schedule is.
    actor_rollout_ref.actor.optim.lr=1e-6
    # Prompts per optimizer step: 4 steps on each batch. A multiple of the GPUs, so that groups stay whole.
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    # Micro-batches are filled up to a budget of tokens instead of a number of rows. Old and reference log-probs, too.
    actor_rollout_ref.actor.use_dynamic_bsz=True
    # Tokens of a micro-batch, 3 of the longest groups or about 12 usual ones. zorro counts packed tokens, fsdp2 those
    # of all rows; memory is the same, 4.4 GiB beside weights (estimate). When short of memory halve it, but not below
    # a group.
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768
    # Scoring keeps nothing for a backward, so twice as many fit. This one is for the actor's old log-probs ...
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=65536
    # ... and this one for the reference's.
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=65536
    # Keeps the policy near the model that it started from. False saves the reference's pass over every batch.
    actor_rollout_ref.actor.use_kl_loss=True
    # Its weight: small, as GSM8K rewards are 0 or 1 and hard to trick.
    actor_rollout_ref.actor.kl_loss_coef=0.001
    # The estimator that is never negative and varies little.
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    # No bonus for entropy: sampling at temperature 1 explores enough.
    actor_rollout_ref.actor.entropy_coeff=0
    # Weights and optimizer stay on the GPU during rollouts. True frees 2.4 GB of it then ...
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    # ... and this 4.8 GB, for copying in each step.
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
)

rollout=(
    # The server that samples.
    actor_rollout_ref.rollout.name=vllm
    # Responses per prompt. More share a prompt better and make advantages less noisy; steps grow with it.
    actor_rollout_ref.rollout.n=8
    # The policy itself is sampled, which log-probs of the actor stand for.
    actor_rollout_ref.rollout.temperature=1.0
    # One server per GPU: the model is small.
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    # Share of the GPU for vLLM's weights and cache while it samples: 48 GB, beside 7 GB that the actor keeps there.
    # Lower it when vLLM finds too little free memory as it wakes up.
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    # The longest prompt with the longest response, 512 + 1024.
    actor_rollout_ref.rollout.max_model_len=1536
    # Tokens of one vLLM iteration: prompts are short, so that many start at once.
    actor_rollout_ref.rollout.max_num_batched_tokens=16384
    # Rows sampled at once. The cache holds 260 of the longest, and twice as many usual ones.
    actor_rollout_ref.rollout.max_num_seqs=512
    # CUDA graphs: decoding a small model is bound by launches without them. True saves their memory.
    actor_rollout_ref.rollout.enforce_eager=False
    # vLLM gives its memory back while the actor trains.
    actor_rollout_ref.rollout.free_cache_engine=True
)

trainer=(
    # One machine with one GPU.
    trainer.nnodes=1
    trainer.n_gpus_per_node=1
    # Passes over the training file, 29 steps each.
    trainer.total_epochs=15
    # What loggers call the run.
    trainer.project_name=gsm8k
    trainer.experiment_name="${OUT##*/}"
    # Beside the console; `wandb` and others work, too.
    trainer.logger=[console,tensorboard]
    # Where tensorboard's files go, for the process that writes them.
    ++ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR="$OUT/tensorboard"
    # Where the composed config is kept.
    hydra.run.dir="$OUT/hydra"
    # Steps between validations, greedy over validation.parquet; one before the first step is the baseline.
    trainer.test_freq=5
    trainer.val_before_train=True
    # Steps between checkpoints: weights and optimizer, 7 GB each.
    trainer.save_freq=20
    trainer.default_local_dir="$OUT/checkpoints"
    # Older ones are removed.
    trainer.max_actor_ckpt_to_keep=2
    # The same command goes on from the last checkpoint; with either strategy.
    trainer.resume_mode=auto
)

exec "$PYTHON" -m verl.trainer.main_ppo \
    "${data[@]}" "${algorithm[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
