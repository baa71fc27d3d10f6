#!/usr/bin/env bash
# Runs txl_jax on one machine with a CPU, one GPU, many GPUs, or the TPU of a TPU VM.
#   launch/local.sh --config=configs/quickstart.py --workdir=runs/quickstart
# Makes the virtual environment on the first run; launch/setup_env.sh lists the variables that
# configure it. TXL_DRY_RUN=1 prints the commands without running them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=launch/setup_env.sh
source "$root/launch/setup_env.sh"
txl_launched_by "$0"
txl_setup_env "$root"
txl_require_extras
txl_run exec "$TXL_PYTHON" -m txl_jax.main "$@"
