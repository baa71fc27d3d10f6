#!/usr/bin/env bash
# Correctness, then speed, then a table, on one GPU: report.json and report.md in a folder.
#   benchmarks/gpu.sh OUT_FOLDER [SECONDS]        goes on where an earlier call with OUT_FOLDER ended
# ORIGINAL=DIR: the authors' pytorch/ folder, timed beside ours. PYTHON: with jax[cuda] and pytest.
# WHEELS=DIR: what benchmarks/gpu_wheels.txt names, installed first. SMOKE=1: a rehearsal on a CPU.
# Ends with 1 where the packages or the GPU will not do, where a command failed, or where a test was
# skipped. A command that the end of a slice cut is repeated.
set -euo pipefail
out="${1:?benchmarks/gpu.sh OUT_FOLDER [SECONDS]}"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false   # a peer shares the GPU
if [[ -n "${WHEELS-}" ]]; then
    "${PYTHON:-python3}" -m pip install --no-index --no-deps --find-links="$WHEELS" \
        --requirement=benchmarks/gpu_wheels.txt
fi
exec "${PYTHON:-python3}" -m benchmarks.gpu_pass --out="$out" --seconds="${2:-580}" \
    ${SMOKE:+--smoke} ${ORIGINAL:+--original="$ORIGINAL"}
