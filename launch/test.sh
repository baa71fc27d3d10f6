#!/usr/bin/env bash
# Every check of the project: style, types, tests. Arguments go to pytest.
#   launch/test.sh                      the default tests
#   launch/test.sh -m integration       the expensive tests
#   launch/test.sh -m slow              the slow tests
#   JAX_PLATFORMS=cuda launch/test.sh -m gpu
# Makes the virtual environment on the first run; launch/setup_env.sh lists the variables that
# configure it.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=launch/setup_env.sh
source "$root/launch/setup_env.sh"
txl_setup_env "$root" test
cd "$root"
txl_run "$TXL_PYTHON" -m ruff check .
txl_run "$TXL_PYTHON" -m ruff format --check .
txl_run "$TXL_PYTHON" -m mypy
txl_run "$(dirname "$TXL_PYTHON")/lint-imports"
txl_run exec "$TXL_PYTHON" -m pytest "$@"
