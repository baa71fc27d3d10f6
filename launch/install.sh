#!/usr/bin/env bash
# Makes the virtual environment, or brings it up to date, and trains nothing. The arguments are extras
# (groups of optional dependencies) that are installed too.
#   launch/install.sh                       for this machine
#   TXL_EXTRAS=cuda13 launch/install.sh     on a login node without a GPU, for the GPUs of the jobs
# launch/setup_env.sh lists the variables that configure it. TXL_DRY_RUN=1 only prints the commands.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=launch/setup_env.sh
source "$root/launch/setup_env.sh"
txl_setup_env "$root" "$@"
