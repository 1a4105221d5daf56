#!/usr/bin/env bash
# GRPO of Qwen3-32B on questions about long documents: 4 nodes, each with 8 GPUs of 141 GB (H200).
#
#   ray start --head --port=6379                          # on the first node
#   ray start --address=<its address>:6379                # on each other node; recipes/cluster/start_ray.sh does both
#
#   python3 recipes/data/long_context_qa.py --source docqa --out /shared/docqa --tokenizer Qwen/Qwen3-32B    # once
#   DATA=/shared/docqa OUT=/shared/grpo_32b recipes/grpo_qwen3_32b_long_context.sh    # on the head
#   STRATEGY=fsdp2 DATA=/shared/docqa ...                                  # veRL's own engine, to compare with
#
# Started once, on the head, it uses all nodes. Each of them needs veRL and zorro-verl, and MODEL, DATA, OUT and this
# folder under the same path: docs/multi-node.md.
#
# Arguments are handed to veRL behind those below; the last one of a key counts: trainer.total_epochs=1
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

STRATEGY=${STRATEGY:-zorro}                          # zorro | fsdp2
MODEL=${MODEL:-Qwen/Qwen3-32B}                       # name, or folder by its full path
DATA=$(realpath -m "${DATA:-data/docqa}")            # train.parquet and validation.parquet
OUT=$(realpath -m "${OUT:-outputs/grpo_qwen3_32b_long_context_$STRATEGY}") # checkpoints, logs
PYTHON=${PYTHON:-python3}                            # the Python that has veRL
NNODES=${NNODES:-4}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

# Lengths are in tokens. A group is a prompt and its 8 responses: at most 16384 + 8 x 4096 = 49152 packed tokens, where
# eight rows of their own have 163840.
data=(
    # Parquet files in veRL's format, made by the preparation above.
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/validation.parquet"
    # Prompts in a step, each answered `rollout.n` times: 2048 rows.
    data.train_batch_size=256
    # The document and the question.
    data.max_prompt_length=16384
    # Thinking and the answer. A longer one is cut and scores 0.
    data.max_response_length=4096
    # Leaves out what is longer than max_prompt_length ...
    data.filter_overlong_prompts=True
    # ... on so many processes, as documents take their time to tokenize ...
    data.filter_overlong_prompts_workers=8
    # ... and stops, should there be any left, instead of cutting a document.
    data.truncation=error
    # Qwen3's template: thinking, as answers are found by reading several places.
    ++data.apply_chat_template_kwargs.enable_thinking=True
    # The order of the prompts is the same in every run, so that strategies can be compared step by step.
    data.seed=1
)

reward=(
    # Compares the answer with the right one. Every node needs this file at the same path.
    reward.custom_reward_function.path="$here/rewards/long_context_qa.py"
    reward.custom_reward_function.name=compute_score
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
    # parameter, over 32 GPUs: 16.4 GB on each.
    actor_rollout_ref.model.path="$MODEL"
    # Rows are packed without padding. zorro does so in any case; fsdp2 needs it to slice rows.
    actor_rollout_ref.model.use_remove_padding=True
    # No logits are kept: logits_optimization=memory in zorro, veRL's fused kernels in fsdp2.
    actor_rollout_ref.model.use_fused_kernels=True
    # Layers keep their input only and are computed again in the backward. Without, a group does not fit.
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    # Usual for full fine-tuning with GRPO; constant, as veRL's default schedule is.
    actor_rollout_ref.actor.optim.lr=1e-6
    # Prompts per optimizer step: 4 steps on each batch, 8 prompts of a step on each of the 8 data-parallel ranks. A
    # multiple of these, so that groups stay whole.
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    # Rows are sliced over 4 GPUs of a node: a quarter of each layer's activations on each, and 8 ranks of 32 prompts a
    # step, which differ less in work than 32 ranks of 8 would. A divisor of 8, the key heads; 8 when short of memory,
    # with half the budgets below.
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
    # Micro-batches are filled up to a budget of tokens instead of a number of rows. Old and reference log-probs, too.
    actor_rollout_ref.actor.use_dynamic_bsz=True
    # Tokens of a micro-batch per GPU; a row of 4 GPUs has 98304, two of the longest groups. zorro counts packed tokens,
    # fsdp2 those of all rows; memory is the same, 26.3 GiB beside weights (estimate). All weights are gathered once per
    # micro-batch and pass: larger is better, while it fits. When short of memory go down to 12288, not below a group.
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    # Scoring keeps nothing for a backward, so twice as many fit. This one is for the actor's old log-probs ...
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=49152
    # ... and this one for the reference's.
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=49152
    # Keeps the policy near the model that it started from. False saves the reference's pass over every batch, and 33 GB
    # of each node's memory, where its weights lie.
    actor_rollout_ref.actor.use_kl_loss=True
    # Its weight.
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
    # GPUs of one server, of one node: 65.5 GB of weights over 4 of them leave most of each for the cache.
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    # Share of a GPU for vLLM's weights and cache while it samples: 99 GB, beside 12 GB that the actor keeps there.
    # Lower it, or offload above, when vLLM finds too little free memory as it wakes up.
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    # The longest prompt with the longest response, 16384 + 4096.
    actor_rollout_ref.rollout.max_model_len=20480
    # Tokens of one vLLM iteration: a longest prompt. Longer ones make decoding wait longer for prompts.
    actor_rollout_ref.rollout.max_num_batched_tokens=16384
    # Rows sampled at once: each of the 8 servers has 256 in a step.
    actor_rollout_ref.rollout.max_num_seqs=256
    # CUDA graphs make decoding faster. True saves their memory.
    actor_rollout_ref.rollout.enforce_eager=False
    # vLLM gives its memory back while the actor trains.
    actor_rollout_ref.rollout.free_cache_engine=True
)

trainer=(
    # The cluster that `ray start` made; without one the run ends at once, instead of waiting for GPUs.
    ++ray_kwargs.ray_init.address=auto
    # All GPUs are the actor's, the reference's and the rollout's, in turns.
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$GPUS_PER_NODE"
    # Passes over the training file, at most 5 steps each: of its 1591 prompts some are longer, some for validation.
    trainer.total_epochs=20
    # What loggers call the run.
    trainer.project_name=docqa
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
    # Steps between checkpoints: weights and optimizer, 393 GB each, written by all ranks. A lost node costs the steps
    # since the last one.
    trainer.save_freq=10
    trainer.default_local_dir="$OUT/checkpoints"
    # Older ones are removed.
    trainer.max_actor_ckpt_to_keep=2
    # The same command goes on from the last checkpoint, on as many GPUs; with either strategy.
    trainer.resume_mode=auto
)

exec "$PYTHON" -m verl.trainer.main_ppo \
    "${data[@]}" "${reward[@]}" "${algorithm[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
