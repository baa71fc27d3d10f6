#!/usr/bin/env bash
# Tests and times this project on one GPU; writes report.json and a table, report.md, to a folder.
#   benchmarks/gpu.sh OUT_FOLDER [SECONDS]       continues an earlier call with OUT_FOLDER
# A call ends after SECONDS; the next call repeats the command that was cut off. These environment
# variables change a call. ORIGINAL=DIR: the authors' pytorch/ folder, whose code is timed too.
# PYTHON: a Python with jax[cuda] and pytest. WHEELS=DIR: a folder with the wheels of
# benchmarks/gpu_wheels.txt, which the script installs first. SMOKE=1: a rehearsal on a CPU.
# The exit code is 1 if packages are missing or have wrong versions, if JAX finds no GPU, if a
# command failed, or if a test was skipped.
set -euo pipefail
out="$(realpath -m "${1:?benchmarks/gpu.sh OUT_FOLDER [SECONDS]}")"
if [[ -n "${ORIGINAL-}" ]]; then ORIGINAL="$(realpath -m "$ORIGINAL")"; fi
if [[ -n "${WHEELS-}" ]]; then WHEELS="$(realpath -m "$WHEELS")"; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false   # leaves GPU memory for the authors' program
if [[ -n "${WHEELS-}" ]]; then
    "${PYTHON:-python3}" -m pip install --no-index --no-deps --find-links="$WHEELS" \
        --requirement=benchmarks/gpu_wheels.txt
fi
exec "${PYTHON:-python3}" -m benchmarks.gpu_pass --out="$out" --seconds="${2:-580}" \
    ${SMOKE:+--smoke} ${ORIGINAL:+--original="$ORIGINAL"}
