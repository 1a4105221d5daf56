#!/usr/bin/env bash
# One recipe as a Slurm job: Ray's head on the first node, a worker on each other, then the recipe, once.
#
#   DATA=/shared/docqa OUT=/shared/grpo_32b sbatch recipes/cluster/slurm.sh recipes/grpo_qwen3_32b_long_context.sh
#
# Another number of nodes: sbatch --nodes=2 ...; it is the recipe's NNODES, too. Arguments behind the recipe are handed to it. The job ends with the recipe's exit code. Submitted again, it goes on
# from the last checkpoint in OUT (`trainer.resume_mode=auto`). Submit it from the folder that has `recipes`, which all
# nodes must see, as they must MODEL, DATA and OUT: docs/multi-node.md. Site-specific lines, such as modules, containers
# and partitions, belong into a copy.
#
# One Ray node on each machine, which owns all of it:
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --job-name=zorro
#SBATCH --output=%x-%j.log
set -euo pipefail

recipe=$(realpath "${1:?usage: sbatch slurm.sh RECIPE [ARGUMENTS]}")
shift
# By the recipe's place: what Slurm runs is a copy of this file, elsewhere.
start_ray=$(dirname "$recipe")/cluster/start_ray.sh

# What start_ray.sh and the recipe read.
export PYTHON=${PYTHON:-python3}
export NNODES=$SLURM_JOB_NUM_NODES
export GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?expected a job with --gpus-per-node}}
# A port of this job's own, should two jobs meet on a machine.
export PORT=$((20000 + SLURM_JOB_ID % 10000))
# And a token of its own: nobody else's process joins this Ray or gets commands into it.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$("$PYTHON" -c "import secrets; print(secrets.token_hex(32))")

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]} # this script runs there, too
steps=()

# Ends what this job started: `srun` hands the signal on, and `ray start --block` takes its Ray down.
end_ray() {
    if [[ ${#steps[@]} -gt 0 ]]; then
        kill "${steps[@]}" 2>/dev/null || true # some may have ended
        wait "${steps[@]}" || true             # with the signal's exit code
    fi
}
trap end_ray EXIT
trap 'exit 143' TERM # a cancelled job, or one out of time

# --overlap: steps share the node's cores and GPUs with each other. --cpu-bind=none: they get all cores, also where a site
# binds each task to one. --block: Slurm ends what a step leaves behind.
srun --overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist="$head" "$start_ray" head --block &
steps+=($!)
NNODES=1 "$start_ray" wait "$head"
if [[ $NNODES -gt 1 ]]; then
    others=$((NNODES - 1))
    srun --overlap --cpu-bind=none --nodes="$others" --ntasks="$others" --exclude="$head" "$start_ray" worker "$head" --block &
    steps+=($!)
fi
"$start_ray" wait "$head"

# veRL's driver; address=auto in the recipe is then this one.
RAY_ADDRESS=$head:$PORT bash "$recipe" "$@"
