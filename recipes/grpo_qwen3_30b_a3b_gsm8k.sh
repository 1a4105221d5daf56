#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B, a mixture of experts, on GSM8K with solved problems in each prompt: 2 nodes, each with 8 GPUs
# of 80 GB.
#
#   ray start --head --port=6379                          # on the first node
#   ray start --address=<its address>:6379                # on the other; recipes/cluster/start_ray.sh does both
#
#   python3 recipes/data/gsm8k.py --source gsm8k --out /shared/gsm8k_16_shots --shots 16    # once
#   DATA=/shared/gsm8k_16_shots OUT=/shared/grpo_30b recipes/grpo_qwen3_30b_a3b_gsm8k.sh    # on the head
#   STRATEGY=fsdp2 DATA=/shared/gsm8k_16_shots ...                                  # veRL's own engine, to compare with
#
# Started once, on the head, it uses both nodes. Each of them needs veRL and zorro-verl, and MODEL, DATA and OUT under
# the same path: docs/multi-node.md.
#
# Arguments are handed to veRL behind those below; the last one of a key counts: trainer.total_epochs=1
set -euo pipefail

STRATEGY=${STRATEGY:-zorro}                          # zorro | fsdp2
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}                   # name, or folder by its full path
DATA=$(realpath -m "${DATA:-data/gsm8k_16_shots}")   # train.parquet and validation.parquet
OUT=$(realpath -m "${OUT:-outputs/grpo_qwen3_30b_a3b_gsm8k_$STRATEGY}") # checkpoints, logs
PYTHON=${PYTHON:-python3}                            # the Python that has veRL
NNODES=${NNODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}

# Lengths are in tokens. A group is a prompt and its 8 responses: at most 4096 + 8 x 1024 = 12288 packed tokens.
data=(
    # Parquet files in veRL's format, made by the preparation above.
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/validation.parquet"
    # Prompts in a step, each answered `rollout.n` times: 2048 rows. Fewer make steps shorter and advantages noisier.
    data.train_batch_size=256
    # 16 solved problems of about 200 each, and the question.
    data.max_prompt_length=4096
    # An answer without thinking has 100 to 400; a longer one is cut and scores 0.
    data.max_response_length=1024
    # Leaves out what is longer than max_prompt_length ...
    data.filter_overlong_prompts=True
    # ... and stops, should there be any left, instead of cutting a prompt.
    data.truncation=error
    # Qwen3's template: no thinking, as the solved problems show how to answer.
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
    # Weights in float32 with bfloat16 mixed precision, as veRL does by default. With gradients and optimizer 16 bytes
    # for each of 30.5 billion parameters, over 16 GPUs: 30.5 GB on each.
    actor_rollout_ref.model.path="$MODEL"
    # Rows are packed without padding. zorro does so in any case; fsdp2 does it with this.
    actor_rollout_ref.model.use_remove_padding=True
    # No logits are kept: logits_optimization=memory in zorro, veRL's fused kernels in fsdp2.
    actor_rollout_ref.model.use_fused_kernels=True
    # Layers keep their input only and are computed again in the backward: a token goes through 8 experts in each of 48.
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    # Usual for full fine-tuning with GRPO; constant, as veRL's default schedule is.
    actor_rollout_ref.actor.optim.lr=1e-6
    # Prompts per optimizer step: 4 steps on each batch, 4 prompts of a step on each GPU. A multiple of the GPUs, so
    # that groups stay whole.
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    # Rows are sliced over so many GPUs. 1: a group fits one GPU. When short of memory take 2 or 4, and a half or a
    # quarter of the budgets below, which are per GPU.
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
    # Micro-batches are filled up to a budget of tokens instead of a number of rows. Old and reference log-probs, too.
    actor_rollout_ref.actor.use_dynamic_bsz=True
    # Tokens of a micro-batch: two of the longest groups. zorro counts packed tokens, fsdp2 those of all rows; memory is
    # the same. All experts are gathered once per micro-batch and pass: larger is better, while it fits. When short of
    # memory go down to 12288, not below a group.
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    # Scoring keeps nothing for a backward, so twice as many fit. This one is for the actor's old log-probs ...
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=49152
    # ... and this one for the reference's.
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=49152
    # Keeps the policy near the model that it started from. False saves the reference's pass over every batch, and 61 GB
    # of each node's memory, where its weights lie.
    actor_rollout_ref.actor.use_kl_loss=True
    # Its weight: small, as GSM8K rewards are 0 or 1 and hard to trick.
    actor_rollout_ref.actor.kl_loss_coef=0.001
    # The estimator that is never negative and varies little.
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    # No bonus for entropy: sampling at temperature 1 explores enough.
    actor_rollout_ref.actor.entropy_coeff=0
    # Weights and optimizer lie in host memory during rollouts, 183 GB on each node, for copying in each
    # step: else 23 GB of each GPU would be missing beside vLLM's 48. This is for the weights ...
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    # ... and this for the optimizer.
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
)

rollout=(
    # The server that samples.
    actor_rollout_ref.rollout.name=vllm
    # Responses per prompt. More share a prompt better and make advantages less noisy; steps grow with it.
    actor_rollout_ref.rollout.n=8
    # The policy itself is sampled, which log-probs of the actor stand for.
    actor_rollout_ref.rollout.temperature=1.0
    # GPUs of one server, of one node: 61 GB of weights over 4 of them leave most of each for the cache.
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    # Share of a GPU for vLLM's weights and cache while it samples: 48 GB. Lower it when vLLM finds too little free
    # memory as it wakes up.
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    # The longest prompt with the longest response, 4096 + 1024.
    actor_rollout_ref.rollout.max_model_len=5120
    # Tokens of one vLLM iteration: several prompts at once, which keeps experts busy.
    actor_rollout_ref.rollout.max_num_batched_tokens=16384
    # Rows sampled at once: each of the 4 servers has 512 in a step.
    actor_rollout_ref.rollout.max_num_seqs=512
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
    # Passes over the training file, 29 steps each.
    trainer.total_epochs=5
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
    trainer.test_freq=10
    trainer.val_before_train=True
    # Steps between checkpoints: weights and optimizer, 366 GB each, written by all ranks. A lost node costs the steps
    # since the last one.
    trainer.save_freq=20
    trainer.default_local_dir="$OUT/checkpoints"
    # Older ones are removed.
    trainer.max_actor_ckpt_to_keep=2
    # The same command goes on from the last checkpoint, on as many GPUs; with either strategy.
    trainer.resume_mode=auto
)

exec "$PYTHON" -m verl.trainer.main_ppo \
    "${data[@]}" "${algorithm[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
