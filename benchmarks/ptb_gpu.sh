#!/usr/bin/env bash
# A Penn Treebank candidate on one GPU, unattended, in slices.
#   benchmarks/ptb_gpu.sh CONFIG DATA WORKDIR OUT [SECONDS] [--config.KEY=VALUE ..]
# CONFIG: configs/ptb.py, configs/ptb_authors.py. DATA: folder of ptb.train.txt ..  WORKDIR: on the
# machine's own disk; the next call with it goes on from its last checkpoint. OUT: gets the curve,
# the settings, the scores, and once it is finished the weights (bfloat16, pieces under 16 MiB).
# SECONDS: after so many the run is told to save and stop (default 560).
# Candidates are scored on the validation split. TEST=1 scores a finished one on the test split,
# at temperature 1 and at the one that is best on validation: once, for the candidate that was
# chosen. PYTHON: with jax[cuda]. WHEELS=DIR: what benchmarks/gpu_wheels.txt names, installed first.
# SMOKE=1: a rehearsal on a CPU, with the recipe's small variant. Versions and GPU are checked first.
set -euo pipefail
usage="benchmarks/ptb_gpu.sh CONFIG DATA WORKDIR OUT [SECONDS] [--config.KEY=VALUE ..]"
config="${1:?$usage}" data="${2:?$usage}" workdir="${3:?$usage}" out="${4:?$usage}"
shift 4
seconds=560
if [[ "${1-}" =~ ^[0-9]+$ ]]; then seconds="$1"; shift; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
mkdir -p "$out"
if [[ -n "${WHEELS-}" ]]; then
    "$python" -m pip install --no-index --no-deps --find-links="$WHEELS" \
        --requirement=benchmarks/gpu_wheels.txt
fi
if [[ -n "${SMOKE-}" ]]; then export JAX_PLATFORMS=cpu; else export JAX_PLATFORMS=cuda,cpu; fi
"$python" -m benchmarks.gpu_image ${SMOKE:+--smoke} 2>&1 | tee -a "$out/log.txt"

run=("$python" -m txl_jax.main "--config=$config${SMOKE:+:smoke}" "--workdir=$workdir" "--config.data.path=$data"
     --config.mesh.data=1 --config.generate.length=0 --config.evaluate.split=valid "$@")
code=0
timeout --signal=TERM --kill-after=60 "$seconds" "${run[@]}" 2>&1 | tee -a "$out/log.txt" || code="${PIPESTATUS[0]}"

collect() {  # one run's folder, and where its results go
    mkdir -p "$2"
    for name in metrics.jsonl config.json evaluation.json evaluations.jsonl temperature.json loss.png; do
        if [ -e "$1/$name" ]; then cp "$1/$name" "$2/"; fi
    done
}

folders=("$workdir")
if compgen -G "$workdir/seed_*" > /dev/null; then folders=("$workdir"/seed_*); fi
for folder in "${folders[@]}"; do
    target="$out"
    if [ "$folder" != "$workdir" ]; then target="$out/$(basename "$folder")"; fi
    if [ "$code" -eq 0 ]; then
        "$python" -m benchmarks.pieces split "$folder" "$target/weights"
        if [ "${TEST:-0}" = 1 ]; then
            "$python" -m benchmarks.temperature "$folder" "--data=$data" --test 2>&1 | tee -a "$out/log.txt"
        fi
    fi
    collect "$folder" "$target"
done
if [ "$code" -ne 0 ]; then echo "not finished (exit code $code): call again to go on" | tee -a "$out/log.txt"; fi
exit "$code"
