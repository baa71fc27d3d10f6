#!/usr/bin/env bash
# Trains a candidate recipe for Penn Treebank on one GPU. A call has a time limit, and the next call
# continues the training.
#   benchmarks/ptb_gpu.sh CONFIG DATA WORKDIR OUT [SECONDS] [--config.KEY=VALUE ..]
# CONFIG: configs/ptb.py or configs/ptb_authors.py. DATA: folder with ptb.train.txt, ptb.valid.txt
# and ptb.test.txt. WORKDIR: a folder on the machine's own disk; the next call with this folder
# resumes from the last checkpoint in it. OUT: folder for the curve, the settings, the scores, and at
# the end the weights (bfloat16, in files under 16 MiB). SECONDS: the run saves and stops after this
# time (default 560).
# Candidates are scored on the validation split. The environment variable TEST=1 also scores a
# finished candidate on the test split, at temperature 1 and at the temperature that is best on
# validation; use it once, for the chosen candidate. Other environment variables: PYTHON: a Python
# with jax[cuda]. WHEELS=DIR: a folder with the wheels of benchmarks/gpu_wheels.txt, which the script
# installs first. SMOKE=1: a rehearsal on a CPU, with the recipe's smoke variant. The script checks
# the versions and the GPU before it trains.
set -euo pipefail
usage="benchmarks/ptb_gpu.sh CONFIG DATA WORKDIR OUT [SECONDS] [--config.KEY=VALUE ..]"
config="${1:?$usage}" data="${2:?$usage}" workdir="${3:?$usage}" out="${4:?$usage}"
shift 4
data="$(realpath -m "$data")" workdir="$(realpath -m "$workdir")" out="$(realpath -m "$out")"
if [[ -n "${WHEELS-}" ]]; then WHEELS="$(realpath -m "$WHEELS")"; fi
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

collect() {  # collect RUN TARGET: copies the results in the folder of one run to TARGET
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
