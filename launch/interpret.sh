#!/usr/bin/env bash
# Tests the Triton kernels in Triton's interpreter; no GPU is needed. Arguments go to pytest.
#   launch/interpret.sh              compares the kernels with plain attention
#   launch/interpret.sh -m slow -s   also puts faults into the kernels; prints which check finds each
# Makes a separate environment, .venv-interpret, with the versions of launch/constraints.txt and the
# versions of torch and triton below. The interpreter works on arrays of PyTorch; nothing else in
# these tests needs PyTorch.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=launch/setup_env.sh
source "$root/launch/setup_env.sh"
TXL_VENV="${TXL_VENV:-$root/.venv-interpret}"
export TXL_EXTRAS="" # no GPU libraries
txl_setup_env "$root" test
cd "$root"
txl_run "$TXL_PYTHON" -m pip install --disable-pip-version-check --quiet torch==2.13.0 triton==3.7.1
export JAX_PLATFORMS=cpu
txl_run exec "$TXL_PYTHON" -m pytest -n 0 tests/model/test_kernels_triton.py tests/model/test_kernels_bugs.py "$@"
