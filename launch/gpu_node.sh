#!/usr/bin/env bash
# Runs txl_jax on one machine with NVIDIA GPUs; a single process uses all of them.
#   launch/gpu_node.sh --config=configs/enwik8_24l.py --workdir=runs/enwik8_24l
# On several such machines without a scheduler, run the same command on each. NODE_RANK is the number
# of the machine, from 0. COORDINATOR is the name of machine 0 and a free port on it. The workdir must be
# on storage that all machines share:
#   COORDINATOR=node0:12345 NUM_NODES=2 NODE_RANK=0 launch/gpu_node.sh --config=… --workdir=…
# The script sets JAX_PLATFORMS=cuda,cpu unless the variable is set already. If a GPU does not start,
# the error says why.
# TXL_DRY_RUN=1 prints the commands without running them. Not run on several machines yet.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=launch/setup_env.sh
source "$root/launch/setup_env.sh"
if [[ -n "${COORDINATOR-}${NUM_NODES-}${NODE_RANK-}" ]]; then
  added=(--distributed --coordinator="${COORDINATOR:?set this variable to HOST:PORT of machine 0}"
    --num_processes="${NUM_NODES:?set this variable to the number of machines}"
    --process_id="${NODE_RANK:?set this variable to 0 on machine 0, 1 on the next, …}")
  set -- "${added[@]}" "$@"
  export TXL_ADDED="${added[*]}"
  txl_launched_by env "COORDINATOR=$COORDINATOR" "NUM_NODES=$NUM_NODES" "NODE_RANK=$NODE_RANK" "$0"
fi
txl_launched_by "$0"
if [[ -n "${TXL_DRY_RUN-}" ]]; then
  txl_run nvidia-smi -L
else
  code=0
  txl_list_gpus || code=$?
  if ((code == 1)); then
    printf 'nvidia-smi finds no GPU on this machine; use launch/local.sh to run on a CPU\n' >&2
  fi
  if ((code != 0)); then exit 1; fi
fi
txl_choose_extras txl_cuda_extra
txl_setup_env "$root"
txl_require cuda
txl_run exec "$TXL_PYTHON" -m txl_jax.main "$@"
