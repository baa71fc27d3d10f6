#!/usr/bin/env bash
# Correctness, then speed, then a table, on one GPU: report.json and report.md in a folder.
#   benchmarks/gpu.sh OUT_FOLDER [SECONDS]        goes on where an earlier call with OUT_FOLDER ended
# ORIGINAL=DIR: the authors' pytorch/ folder, timed beside ours. PYTHON: with jax[cuda] and pytest.
set -euo pipefail
out="${1:?benchmarks/gpu.sh OUT_FOLDER [SECONDS]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false   # a peer shares the GPU
exec "${PYTHON:-python3}" -m benchmarks.gpu_pass --out="$out" --seconds="${2:-580}" \
    ${ORIGINAL:+--original="$ORIGINAL"}
