#!/usr/bin/env bash
# Tests and times this project on one GPU; writes report.json and a table, report.md, to a folder.
#   benchmarks/gpu.sh OUT_FOLDER [SECONDS]       goes on where an earlier call with OUT_FOLDER ended
# ORIGINAL=DIR: the authors' pytorch/ folder, timed beside ours. PYTHON: a Python with jax[cuda] and
# pytest. WHEELS=DIR: folder with the wheels of benchmarks/gpu_wheels.txt, which are installed
# first. SMOKE=1: a rehearsal on a CPU. The exit code is 1 if packages are missing or of wrong
# versions, if JAX finds no GPU, if a command failed, or if a test was skipped. A call ends after
# SECONDS; the next call repeats the command that was cut off.
set -euo pipefail
out="$(realpath -m "${1:?benchmarks/gpu.sh OUT_FOLDER [SECONDS]}")"
if [[ -n "${ORIGINAL-}" ]]; then ORIGINAL="$(realpath -m "$ORIGINAL")"; fi
if [[ -n "${WHEELS-}" ]]; then WHEELS="$(realpath -m "$WHEELS")"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false   # the authors' program needs GPU memory too
if [[ -n "${WHEELS-}" ]]; then
    "${PYTHON:-python3}" -m pip install --no-index --no-deps --find-links="$WHEELS" \
        --requirement=benchmarks/gpu_wheels.txt
fi
exec "${PYTHON:-python3}" -m benchmarks.gpu_pass --out="$out" --seconds="${2:-580}" \
    ${SMOKE:+--smoke} ${ORIGINAL:+--original="$ORIGINAL"}
