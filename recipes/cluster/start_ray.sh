#!/usr/bin/env bash
# Ray on one machine of several: the head on the first, a worker on each other, then one recipe on the head.
#
#   NNODES=4 recipes/cluster/start_ray.sh head              # returns when 4 machines have joined
#   recipes/cluster/start_ray.sh worker 10.0.0.1            # on each other machine; 10.0.0.1 is the head's address
#   NNODES=4 recipes/cluster/start_ray.sh wait 10.0.0.1     # on any: returns when 4 have joined
#   ray stop                                                # on each machine, in the end
#
# Arguments behind these are handed to `ray start`: `--block` (stay until Ray ends; the head then doesn't wait),
# `--num-cpus=32`, `--temp-dir=/scratch/ray` (a short path: sockets lie under it), `--node-manager-port=...` and others
# where a firewall lets only some ports through. See docs/multi-node.md.
set -euo pipefail

PYTHON=${PYTHON:-python3}   # the Python that has veRL and zorro-verl; Ray's workers run in it
PORT=${PORT:-6379}          # of the head, at which the others join
NODE_IP=${NODE_IP:-}        # this machine's address as the others reach it; else that of its default route
INTERFACE=${INTERFACE:-}    # the network device between the machines, as in `ip -brief address`: eth0, ib0
NNODES=${NNODES:-1}         # machines, the head included
WAIT=${WAIT:-600}           # seconds to wait for them

usage() {
    echo "usage: start_ray.sh head | worker ADDRESS | wait ADDRESS, then options of \`ray start\`" >&2
    exit 1
}

# The number of logical slots, which is the number of ranks that fit: GPUs, unless GPUS_PER_NODE says otherwise.
count_gpus() {
    if [[ -n ${GPUS_PER_NODE:-} ]]; then
        echo "$GPUS_PER_NODE"
    elif ! nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU'; then
        echo "start_ray.sh: expected GPUs, nvidia-smi lists none: set GPUS_PER_NODE" >&2
        exit 1
    fi
}

# Ray's workers inherit the environment of `ray start`, so this is the place for what differs between machines. What is
# the same on all can also go through the recipe's ray_kwargs.ray_init.runtime_env.env_vars.
set_variables() {
    if [[ -n $INTERFACE ]]; then
        # NCCL and Gloo choose a device each. Gloo takes the one of the host's own name, which is often loopback:
        # "Gloo connectFullMesh failed ... remote=[127.0.0.1]".
        export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
    fi
    # A head asks for a token where it finds one; who joins brings one only when told so.
    if [[ -n ${RAY_AUTH_TOKEN:-} || -n ${RAY_AUTH_TOKEN_PATH:-} || -f ~/.ray/auth_token ]]; then
        export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
        echo "start_ray.sh: Ray asks for a token; in the shell of the recipe: export RAY_AUTH_MODE=$RAY_AUTH_MODE" >&2
    fi
}

blocks() {
    [[ " $* " == *" --block "* ]]
}

start() {
    local gpus
    gpus=$(count_gpus)
    local options=(
        # Where others find this machine's Ray.
        --node-ip-address="$NODE_IP"
        # One logical slot for each rank.
        --num-gpus="$gpus"
        # No statistics are sent to Ray's makers.
        --disable-usage-stats
    )
    local run=()
    if blocks "$@"; then
        run=(exec) # so that a signal to this script is one to Ray, which then ends all of its processes
    fi
    "${run[@]}" "$PYTHON" -m ray.scripts.scripts start "${options[@]}" "$@"
}

wait_for_nodes() {
    "$PYTHON" - "$1" "$NNODES" "$WAIT" <<'END'
import sys
import time

import ray

address, expected, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
deadline = time.monotonic() + seconds
alive = []
while len(alive) < expected:
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    except ConnectionError as error:  # the head is not there yet
        reason = str(error)
    else:
        reason = " ".join(alive)
    if len(alive) < expected and time.monotonic() > deadline:
        sys.exit(f"start_ray.sh: expected {expected} Ray nodes at {address} within {seconds:.0f} s, got {reason}")
    time.sleep(1)
print(f"{len(alive)} Ray nodes: {' '.join(alive)}")
END
}

[[ $# -ge 1 ]] || usage
role=$1
shift
set_variables
if [[ -z $NODE_IP && $role != wait ]]; then
    NODE_IP=$("$PYTHON" -c "import ray; print(ray.util.get_node_ip_address())")
fi
case $role in
    head)
        # --head: this Ray holds the cluster's state. --port: at which the others join. The dashboard, where it is
        # installed, is for this machine only (--dashboard-host=0.0.0.0 opens it to whoever reaches the machine).
        start --head --port="$PORT" "$@"
        wait_for_nodes "$NODE_IP:$PORT"
        ;;
    worker)
        [[ $# -ge 1 ]] || usage
        address=$1
        shift
        # --address: of the head.
        start --address="$address:$PORT" "$@"
        ;;
    wait)
        [[ $# -ge 1 ]] || usage
        wait_for_nodes "$1:$PORT"
        ;;
    *) usage ;;
esac
