#!/usr/bin/env bash
# Runs txl_jax on a Cloud TPU VM or a pod. Call this on your own machine, where gcloud is installed
# and signed in.
#   export TPU_NAME=txl ZONE=us-west4-a ACCELERATOR_TYPE=v5litepod-16
#   export RUNTIME_VERSION=v2-alpha-tpuv5-lite   # v5p: v2-alpha-tpuv5; v6e: v2-alpha-tpuv6e; v4: tpu-ubuntu2204-base
#   launch/tpu_vm.sh create      TPU_FLAGS: more flags for gcloud, such as --spot
#   launch/tpu_vm.sh setup       copies this folder to every worker (machine of the TPU) and makes the
#                                environment there; TPU_SETUP: a command that every worker runs
#                                before it makes the environment, such as to mount storage
#   launch/tpu_vm.sh run --config=configs/enwik8_24l.py --workdir=gs://BUCKET/enwik8_24l
#   launch/tpu_vm.sh resume …    with the arguments of run: creates a preempted TPU again, then runs
#   launch/tpu_vm.sh stop        sends SIGTERM to every worker: training saves and ends; run resumes it
#   launch/tpu_vm.sh delete      deletes the TPU, and all that is on its disks
# The workdir must outlive the TPU, because the disks of a preempted TPU are lost: use a bucket, or
# storage that every worker mounts (Filestore, gcsfuse). To train on several slices together, run this
# script once for each slice, with the slice's TPU_NAME, and with MEGASCALE_NUM_SLICES,
# MEGASCALE_SLICE_ID (from 0) and MEGASCALE_COORDINATOR_ADDRESS (the address of worker 0 of slice 0).
# Training continues when your machine is switched off; each worker has the output in txl_jax.log.
# TXL_DRY_RUN=1 prints the commands without running them. Not run on a real TPU yet.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=launch/setup_env.sh
source "$root/launch/setup_env.sh"
usage='create, setup, run, resume, stop or delete'
command="${1:?a command is missing; give $usage}"
shift
: "${TPU_NAME:?set this variable to the name of the TPU}"
: "${ZONE:?set this variable to the zone of the TPU}"
if [[ "$command" == create || "$command" == resume ]]; then
  : "${ACCELERATOR_TYPE:?set this variable to the kind and size of the TPU, such as v5litepod-16}"
  : "${RUNTIME_VERSION:?set this variable to the software of the TPU, such as v2-alpha-tpuv5-lite}"
fi
if [[ "$command" == run || "$command" == resume ]] &&
  [[ " $*" != *" --workdir=/"* && " $*" != *" --workdir=gs://"* ]]; then
  printf 'the workdir must outlive the TPU; ' >&2
  printf 'give --workdir=gs://BUCKET/… or --workdir=/MOUNTED/…\n' >&2
  exit 2
fi
slices=""
if [[ -n "${MEGASCALE_NUM_SLICES-}${MEGASCALE_SLICE_ID-}${MEGASCALE_COORDINATOR_ADDRESS-}" ]]; then
  : "${MEGASCALE_NUM_SLICES:?set this variable to the number of slices}"
  : "${MEGASCALE_SLICE_ID:?set this variable to 0 for the first slice, 1 for the next, …}"
  : "${MEGASCALE_COORDINATOR_ADDRESS:?set this variable to the address of worker 0 of slice 0}"
  for name in NUM_SLICES SLICE_ID COORDINATOR_ADDRESS; do
    variable="MEGASCALE_$name"
    slices+=" $(txl_quote "$variable=${!variable}")"
  done
fi

tpu() { txl_run gcloud compute tpus tpu-vm "$1" "$TPU_NAME" --zone="$ZONE" "${@:2}"; }
on_all() { tpu ssh --worker=all --command="$1"; }

create() {
  # shellcheck disable=SC2086  # several flags
  tpu create --accelerator-type="$ACCELERATOR_TYPE" --version="$RUNTIME_VERSION" ${TPU_FLAGS-}
}

setup() { # installs Python 3.11 too, since the TPU images have 3.10, which is too old
  local archive="${TMPDIR:-/tmp}/txl_jax-$TPU_NAME.tar.gz"
  txl_run tar -czf "$archive" --exclude='./.venv*' --exclude=./runs -C "$root" .
  txl_run gcloud compute tpus tpu-vm scp "$archive" "$TPU_NAME:txl_jax.tar.gz" \
    --zone="$ZONE" --worker=all
  if [[ -n "${TPU_SETUP-}" ]]; then on_all "$TPU_SETUP"; fi
  on_all "set -e; mkdir -p txl_jax; tar -xzf txl_jax.tar.gz -C txl_jax; \
apt='sudo apt-get -qy -o DPkg::Lock::Timeout=600'; \$apt update; \
\$apt install python3.11-venv || \$apt install python3-venv; \
cd txl_jax; source launch/setup_env.sh; TXL_EXTRAS=tpu,gcs txl_setup_env \"\$PWD\""
}

run() { # starts training and shows its log; training continues if the connection ends
  local arguments
  printf -v arguments ' %q' "$@"
  on_all "cd txl_jax || exit; export TXL_LAUNCHED_BY='launch/tpu_vm.sh resume' TXL_ADDED=--distributed$slices; \
TXL_EXTRAS=tpu,gcs setsid nohup launch/local.sh --distributed$arguments \
>>../txl_jax.log 2>&1 </dev/null & tail -n 0 --pid=\$! -F ../txl_jax.log; wait \$!"
}

case "$command" in
  create | setup) "$command" ;;
  run) run "$@" ;;
  resume)
    state="$(tpu describe --format='value(state)')" || state="" # empty if the TPU no longer exists
    if [[ -n "${TXL_DRY_RUN-}" ]]; then printf '%s\n' "$state" && state=PREEMPTED; fi
    case "$state" in
      READY | PREEMPTED | TERMINATED | "") ;;
      *)
        printf 'TPU %s is %s; wait until it is READY, or start it\n' "$TPU_NAME" "$state" >&2
        exit 1
        ;;
    esac
    if [[ "$state" == *ED ]]; then tpu delete --quiet; fi
    if [[ "$state" != READY ]]; then
      create
      setup
    fi
    run "$@"
    ;;
  stop) on_all "pkill -TERM -f '[t]xl_jax.main'" ;;
  delete) tpu delete --quiet ;;
  *) printf '%s: no such command; give %s\n' "$command" "$usage" >&2 && exit 2 ;;
esac
