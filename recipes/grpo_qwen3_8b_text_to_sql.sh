#!/usr/bin/env bash
# GRPO of Qwen3-8B on text-to-SQL, a database's schema in each prompt: one node with 8 GPUs of 80 GB.
#
#   python3 recipes/data/text_to_sql.py --source bird --out data/bird    # once; the script says where `bird` is from
#   recipes/grpo_qwen3_8b_text_to_sql.sh                                 # prompts shared
#   STRATEGY=fsdp2 recipes/grpo_qwen3_8b_text_to_sql.sh                  # veRL's own engine, to compare with
#
# Arguments are handed to veRL behind those below; the last one of a key counts: trainer.total_epochs=1
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

STRATEGY=${STRATEGY:-zorro}                          # zorro | fsdp2
MODEL=${MODEL:-Qwen/Qwen3-8B}                        # name, or folder by its full path
DATA=$(realpath -m "${DATA:-data/bird}")             # train.parquet and validation.parquet
OUT=$(realpath -m "${OUT:-outputs/grpo_qwen3_8b_text_to_sql_$STRATEGY}") # checkpoints, logs
PYTHON=${PYTHON:-python3}                            # the Python that has veRL
NNODES=${NNODES:-1}                                  # more than one: start Ray on all of them first
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

# Lengths are in tokens. A group is a prompt and its 8 responses: at most 8192 + 8 x 2048 = 24576 packed tokens.
data=(
    # Parquet files in veRL's format, made by the preparation above.
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/validation.parquet"
    # Prompts in a step, each answered `rollout.n` times: 2048 rows. Fewer make steps shorter and advantages noisier.
    data.train_batch_size=256
    # The schema of the database, and the question. A wide schema has thousands.
    data.max_prompt_length=8192
    # Some reasoning and the query. A longer answer is cut and scores 0.
    data.max_response_length=2048
    # Leaves out what is longer than max_prompt_length ...
    data.filter_overlong_prompts=True
    # ... and stops, should there be any left, instead of cutting a schema.
    data.truncation=error
    # Qwen3's template: no thinking block, the prompt asks for what reasoning there is to be.
    ++data.apply_chat_template_kwargs.enable_thinking=False
    # The order of the prompts is the same in every run, so that strategies can be compared step by step.
    data.seed=1
)

reward=(
    # Runs the query and the right one and compares their rows. Every node needs this file, and the databases, at the
    # same path.
    reward.custom_reward_function.path="$here/rewards/text_to_sql.py"
    reward.custom_reward_function.name=compute_score
    # Processes that run queries, on CPUs.
    reward.num_workers=8
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
    # Weights in float32 with bfloat16 mixed precision, as veRL does by default. With gradients and optimizer 16 bytes a
    # parameter, over 8 GPUs: 16.4 GB on each.
    actor_rollout_ref.model.path="$MODEL"
    # Rows are packed without padding. zorro does so in any case; fsdp2 does it with this.
    actor_rollout_ref.model.use_remove_padding=True
    # No logits are kept, which would take 24 GiB more for the budget below (estimate): logits_optimization=memory in
    # zorro, veRL's fused kernels in fsdp2.
    actor_rollout_ref.model.use_fused_kernels=True
    # Layers keep their input only and are computed again in the backward. Without, a group does not fit.
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    # Usual for full fine-tuning with GRPO; constant, as veRL's default schedule is.
    actor_rollout_ref.actor.optim.lr=1e-6
    # Prompts per optimizer step: 4 steps on each batch, 8 prompts of a step on each GPU. A multiple of the GPUs, so
    # that groups stay whole.
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    # Rows are sliced over so many GPUs. 1: a group fits one GPU. When short of memory take 2 or 4, and a half or a
    # quarter of the budgets below, which are per GPU.
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
    # Micro-batches are filled up to a budget of tokens instead of a number of rows. Old and reference log-probs, too.
    actor_rollout_ref.actor.use_dynamic_bsz=True
    # Tokens of a micro-batch: the longest group and a third more. zorro counts packed tokens, fsdp2 those of all rows;
    # memory is the same, 17.3 GiB beside weights (estimate). When short of memory go down to 24576, not below a group.
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768
    # Scoring keeps nothing for a backward, so twice as many fit. This one is for the actor's old log-probs ...
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=65536
    # ... and this one for the reference's.
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=65536
    # Keeps the policy near the model that it started from. False saves the reference's pass over every batch, and 33 GB
    # of host memory, where its weights lie.
    actor_rollout_ref.actor.use_kl_loss=True
    # Its weight: small, as a query's result is hard to trick.
    actor_rollout_ref.actor.kl_loss_coef=0.001
    # The estimator that is never negative and varies little.
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    # No bonus for entropy: sampling at temperature 1 explores enough.
    actor_rollout_ref.actor.entropy_coeff=0
    # Weights and optimizer stay on the GPU during rollouts. True frees 4.1 GB of each GPU then ...
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    # ... and this 8.2 GB, for copying in each step.
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
)

rollout=(
    # The server that samples.
    actor_rollout_ref.rollout.name=vllm
    # Responses per prompt. More share a prompt better and make advantages less noisy; steps grow with it.
    actor_rollout_ref.rollout.n=8
    # The policy itself is sampled, which log-probs of the actor stand for.
    actor_rollout_ref.rollout.temperature=1.0
    # GPUs of one server: 16.4 GB of weights fit one, and none waits for another. 2 leaves more of each for the cache.
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    # Share of a GPU for vLLM's weights and cache while it samples: 48 GB, beside 12 GB that the actor keeps there.
    # Lower it, or offload above, when vLLM finds too little free memory as it wakes up.
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    # The longest prompt with the longest response, 8192 + 2048.
    actor_rollout_ref.rollout.max_model_len=10240
    # Tokens of one vLLM iteration. Longer prompts are computed in pieces; more makes decoding wait longer for prompts.
    actor_rollout_ref.rollout.max_num_batched_tokens=16384
    # Rows sampled at once; the cache, which holds a group's prompt once, bounds them for long prompts.
    actor_rollout_ref.rollout.max_num_seqs=256
    # CUDA graphs make decoding faster. True saves their memory.
    actor_rollout_ref.rollout.enforce_eager=False
    # vLLM gives its memory back while the actor trains.
    actor_rollout_ref.rollout.free_cache_engine=True
)

trainer=(
    # All GPUs are the actor's, the reference's and the rollout's, in turns.
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$GPUS_PER_NODE"
    # Passes over the training file, at most 36 steps each.
    trainer.total_epochs=10
    # What loggers call the run.
    trainer.project_name=bird
    trainer.experiment_name="${OUT##*/}"
    # Beside the console; `wandb` and others work, too.
    trainer.logger=[console,tensorboard]
    # Where tensorboard's files go, for the process that writes them.
    ++ray_kwargs.ray_init.runtime_env.env_vars.TENSORBOARD_DIR="$OUT/tensorboard"
    # Where the composed config is kept.
    hydra.run.dir="$OUT/hydra"
    # Steps between validations, greedy over validation.parquet; one before the first step is the baseline.
    trainer.test_freq=10
    trainer.val_before_train=True
    # Steps between checkpoints: weights and optimizer, 98 GB each.
    trainer.save_freq=20
    trainer.default_local_dir="$OUT/checkpoints"
    # Older ones are removed.
    trainer.max_actor_ckpt_to_keep=2
    # The same command goes on from the last checkpoint; with either strategy.
    trainer.resume_mode=auto
)

exec "$PYTHON" -m verl.trainer.main_ppo \
    "${data[@]}" "${reward[@]}" "${algorithm[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
