# Functions that make the project's virtual environment, unless it is up to date. The other scripts
# in this folder source this file. These variables configure it:
#
#   PYTHON      the Python that makes the environment; unset: the first of python3, python3.14 …
#               python3.11 that is 3.11 or newer and can make virtual environments
#   TXL_VENV    the environment's folder; unset: .venv at the root of the repository
#   TXL_EXTRAS  optional dependencies, e.g. "cuda13" or "gcs,hub". Unless it names cuda12, cuda13 or
#               tpu, the script adds the extra for this machine: with a GPU that `nvidia-smi -L`
#               finds, "cuda13" or "cuda12" depending on the driver; with a TPU, "tpu". If the
#               variable is set but empty, no extra is added, even on a machine with a GPU
#   JAX_PLATFORMS  unset: if the extras are for a GPU or TPU, JAX must start this device, or the program ends
#   TXL_DRY_RUN if not empty: this script and the others print every command instead of running it
#
# The versions are those of launch/constraints.txt. The file $TXL_VENV/txl-installed records the
# installed extras, and a hash of pyproject.toml and launch/constraints.txt. If nothing has changed, a
# later run therefore installs nothing and starts at once. A script locks $TXL_VENV.lock while it
# installs.
# shellcheck shell=bash

txl_run() { # txl_run COMMAND...: runs the command; if TXL_DRY_RUN is set, prints it, quoted for a shell
  if [[ -z "${TXL_DRY_RUN-}" ]]; then "$@"; return; fi
  if [[ "$1" == exec ]]; then shift; fi
  txl_quote "$@"
}

txl_quote() { # txl_quote WORD...: prints the words as one line, quoted for a shell
  local word line="" quote="'" escaped="'\"'\"'"
  for word; do
    case "$word" in
      "" | *[!A-Za-z0-9@%+=:,./_-]*) word="'${word//$quote/$escaped}'" ;;
    esac
    line+=" $word"
  done
  printf '%s\n' "${line# }"
}

txl_launched_by() { # txl_launched_by COMMAND...: sets the command that messages give for resuming a run
  if [[ -n "${TXL_VENV-}" ]]; then set -- env "TXL_VENV=$TXL_VENV" "$@"; fi
  export TXL_LAUNCHED_BY="${TXL_LAUNCHED_BY-$(txl_quote "$@")}"
}

txl_show_progress() { # shows what pip downloads: on a terminal in one line, else every 20th package
  local line count=0
  while IFS= read -r line; do
    case "$line" in
      *"Downloading "* | *"Using cached "*)
        line="${line#"${line%%[![:space:]]*}"}"
        count=$((count + 1))
        if [[ -t 2 ]]; then
          printf '\r\033[K  %d packages: %.60s' "$count" "$line" >&2
        elif ((count % 20 == 0)); then
          printf '  %d packages\n' "$count" >&2
        fi
        ;;
      "Installing collected"*)
        if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
        printf '  %d packages downloaded; installing them\n' "$count" >&2
        ;;
    esac
  done
}

txl_find_python() { # prints the path of a suitable Python, or fails and says what was found
  local candidates=(python3 python3.14 python3.13 python3.12 python3.11)
  local probe='import sys, ensurepip, venv; print("%d.%d" % sys.version_info[:2], sys.executable)'
  local name version path report=""
  if [[ -n "${PYTHON-}" ]]; then candidates=("$PYTHON"); fi
  for name in "${candidates[@]}"; do
    version="not found, or without venv" path=""
    read -r version path < <("$name" -c "$probe" 2>/dev/null || echo "$version")
    case "$version" in
      3.1[1-9] | 3.[2-9][0-9]) printf '%s\n' "$path" && return ;;
      3.* | 2.*) report+="  $name: $version"$'\n' ;;
      *) report+="  $name: not found, or without venv"$'\n' ;;
    esac
  done
  printf 'txl_jax needs Python 3.11 or newer with the venv module. These were tried:\n' >&2
  printf '%sInstall such a Python, or name one: PYTHON=/path/to/python %s\n' "$report" "$0" >&2
  return 1
}

txl_list_gpus() { # prints the GPUs that nvidia-smi lists; returns 1 without a GPU, and 2 with a
  # message if nvidia-smi fails
  local said code=0
  if [[ -z "$(command -v nvidia-smi)" ]]; then return 1; fi
  said="$(nvidia-smi -L 2>&1)" || code=$?
  if [[ "$said" == *"No devices were found"* ]]; then return 1; fi
  if ((code == 0)); then printf '%s\n' "$said" && return; fi
  if [[ "${JAX_PLATFORMS-}" == cpu ]]; then return 1; fi
  printf 'nvidia-smi fails (exit code %s, "%s"): load the NVIDIA driver or update it, and reboot ' \
    "$code" "${said//$'\n'/ }" >&2
  printf 'after an update; to run on the CPU: JAX_PLATFORMS=cpu launch/local.sh\n' >&2
  return 2
}

txl_has_tpu() { # txl_has_tpu [ROOT]: succeeds if this machine has a TPU, by the same rules as
  # txl_jax/parallel/accelerators.py
  local name value
  for name in TPU_ACCELERATOR_TYPE TPU_WORKER_HOSTNAMES TPU_WORKER_ID; do
    value="${!name:-WARNING}" # libtpu sets them to "WARNING…" if it finds no TPU
    if [[ "$value" != WARNING* ]]; then return; fi
  done
  if compgen -G "${1-}/dev/accel[0-9]*" >/dev/null; then return; fi
  # Other devices have files in /dev/vfio too; 0x1ae0 is the vendor number of Google.
  compgen -G "${1-}/dev/vfio/[0-9]*" >/dev/null &&
    grep -qsx 0x1ae0 "${1-}"/sys/bus/pci/devices/*/vendor
}

txl_machine_extra() { # prints the extra for this machine's GPU or TPU, if any; fails and says why if
  # nvidia-smi fails or the driver is too old
  local code=0
  txl_list_gpus >/dev/null || code=$?
  case "$code" in
    0) txl_cuda_extra ;;
    1)
      if txl_has_tpu; then
        printf 'tpu\n'
      elif [[ -n "$(command -v nvidia-smi)" && "${JAX_PLATFORMS-}" != cpu ]]; then
        printf 'nvidia-smi finds no GPU on this machine, so the CPU is used\n' >&2
      fi
      ;;
    *) return 1 ;;
  esac
}

txl_job_extra() { # prints the extra for the GPUs of a job: that of this machine's GPU, else cuda13
  local code=0
  txl_list_gpus >/dev/null || code=$?
  case "$code" in
    0) txl_cuda_extra ;;
    1) printf 'cuda13\n' ;;
    *) return 1 ;;
  esac
}

txl_choose_extras() { # txl_choose_extras COMMAND [EXTRA...]: adds the extra that COMMAND prints to
  # $TXL_EXTRAS. Adds nothing if $TXL_EXTRAS is set but empty, or if an extra for GPUs or TPUs is given
  local choose="$1" extra
  if [[ -n "${TXL_EXTRAS+set}" && -z "${TXL_EXTRAS//[[:space:],]/}" ]]; then return; fi
  extra=" ${*:2} ${TXL_EXTRAS-} "
  case "${extra//[[:space:]]/,}" in
    *,cuda12,* | *,cuda13,* | *,tpu,*) return ;;
  esac
  extra="$("$choose")" || return
  if [[ -n "$extra" ]]; then TXL_EXTRAS="${TXL_EXTRAS:+$TXL_EXTRAS,}$extra"; fi
}

txl_cuda_extra() { # prints the extra for this machine's driver and GPUs, or fails and says why
  local answer driver major capability newest=13
  answer="$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null)" ||
    answer="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null)" || answer=""
  while IFS=', ' read -r driver capability _; do
    if [[ ! "$driver" =~ ^[0-9]+\.[0-9.]+$ ]]; then continue; fi
    major="$((10#${driver%%.*}))"
    if ((major < 525)); then
      printf 'the NVIDIA driver %s is too old: CUDA 12 needs 525 or later. ' "$driver" >&2
      printf 'Update the driver, or use the CPU: ' >&2
      printf 'TXL_EXTRAS= JAX_PLATFORMS=cpu launch/local.sh\n' >&2
      return 1
    fi
    if ((major < 580)); then newest=12; fi
    # CUDA 13 does not support GPUs below compute capability 7.5, such as a V100
    if [[ "$capability" =~ ^([0-9]+)\.([0-9]+)$ ]] &&
      ((10 * BASH_REMATCH[1] + BASH_REMATCH[2] < 75)); then newest=12; fi
  done <<<"$answer"
  if [[ -z "${major-}" ]]; then
    printf 'nvidia-smi names no driver version, so cuda12 is used, for driver 525 or later; ' >&2
    printf 'set TXL_EXTRAS=cuda13 for driver 580 or later\n' >&2
    newest=12
  fi
  printf 'cuda%s\n' "$newest"
}

txl_require() { # txl_require PLATFORM: JAX must start this platform, or the program ends and says why
  if [[ -z "${JAX_PLATFORMS+set}" ]]; then txl_run export "JAX_PLATFORMS=$1,cpu"; fi
  if [[ "${JAX_PLATFORMS-}" == cpu* ]]; then
    printf 'JAX_PLATFORMS=%s is set, so every process uses the CPU; unset it to use %s\n' \
      "$JAX_PLATFORMS" "$1" >&2
  fi
}

txl_require_extras() { # JAX must start the platform that the extras are for
  case " ${TXL_EXTRAS-} " in
    *[\ ,]cuda1[23][\ ,]*) txl_require cuda ;;
    *[\ ,]tpu[\ ,]*) txl_require tpu ;;
  esac
}

txl_name_env() { # txl_name_env ROOT: sets $TXL_VENV, $TXL_PYTHON, and the caller's variables stamp (the file
  # that records the installed extras) and key (a hash of the versions, and ROOT; the file's lines begin so)
  set -- "$(cd "$1" && pwd -P)" # one name for the folder, even if it was reached through a link
  TXL_VENV="${TXL_VENV:-$1/.venv}"
  if [[ "$TXL_VENV" != /* ]]; then TXL_VENV="$PWD/$TXL_VENV"; fi
  TXL_PYTHON="$TXL_VENV/bin/python"
  stamp="$TXL_VENV/txl-installed"
  key="$(cat "$1/pyproject.toml" "$1/launch/constraints.txt" | cksum) $1"
}

txl_use_env() { # txl_use_env ROOT: sets $TXL_PYTHON; fails if no environment was made for this GPU
  local key stamp asked="${TXL_EXTRAS-}" wanted word pattern made lacks=""
  txl_name_env "$1"
  if [[ -n "${TXL_DRY_RUN-}" ]]; then return; fi
  txl_choose_extras txl_job_extra || return
  wanted="$TXL_EXTRAS"
  made="$(grep -F "$key [" "$stamp" 2>/dev/null || true)"
  if [[ -z "$made" || ! -x "$TXL_PYTHON" ]]; then lacks=yes; fi
  for word in ${wanted//,/ }; do
    pattern="$word"
    if [[ "$word" == cuda13 && "$asked" != *cuda13* ]]; then
      pattern="cuda1[23]" # drivers for CUDA 13 run CUDA 12 too
    fi
    if ! grep -Eq "\[(.*,)?$pattern(,.*)?\]\$" <<<"$made"; then lacks=yes; fi
  done
  if [[ -z "$lacks" ]]; then return; fi
  printf '%s has no txl_jax%s of the current version, and a job installs nothing. ' \
    "$TXL_VENV" "${wanted:+[$wanted]}" >&2
  printf 'Install it where there is internet, such as on the login node: ' >&2
  printf 'TXL_EXTRAS=%s launch/install.sh\n' "$(txl_quote "$wanted")" >&2
  return 1
}

txl_setup_env() { # txl_setup_env ROOT [EXTRA...]: makes the environment; sets $TXL_PYTHON
  local root="$1" extras key stamp drop forget=none
  shift
  txl_choose_extras txl_machine_extra "$@" || return
  extras="$(tr -s '[:space:],' '[\n*]' <<<"$* ${TXL_EXTRAS-}" | sed '/^$/d' | sort -u | paste -sd, -)"
  case ",$extras," in
    *,cuda12,cuda13,*)
      printf 'TXL_EXTRAS=%s: give cuda12 or cuda13, not both\n' "$extras" >&2
      return 1
      ;;
    *,compile-cuda,*cuda12,*)
      printf 'TXL_EXTRAS=%s: compile-cuda has the plugin of CUDA 13, and JAX takes one CUDA plugin; ' \
        "$extras" >&2
      printf 'make an environment of its own: ' >&2
      printf 'TXL_VENV=.venv-compile TXL_EXTRAS= launch/install.sh compile-cuda\n' >&2
      return 1
      ;;
    *,cuda12,*) drop=cuda13 forget="cuda13|compile-cuda" ;;
    *,cuda13,* | *,compile-cuda,*) drop=cuda12 forget=cuda12 ;;
    *) drop="" ;;
  esac
  txl_name_env "$root"
  if txl_is_installed; then return; fi
  if [[ -n "${TXL_DRY_RUN-}" || -z "$(command -v flock)" ]]; then
    txl_install
    return
  fi
  mkdir -p "$(dirname "$TXL_VENV")"
  { # one installation at a time, even on machines that share the disk
    if ! flock -n 9; then
      printf 'Waiting for an installation in %s to end\n' "$TXL_VENV" >&2
      flock 9 || printf 'this disk has no locks: no other machine may install in %s now\n' \
        "$TXL_VENV" >&2
    fi
    if ! txl_is_installed; then txl_install; fi
  } 9>"${TXL_VENV%/}.lock"
}

txl_is_installed() { # succeeds if the caller's $extras are in $TXL_VENV, in the current versions
  [[ -x "$TXL_PYTHON" ]] && grep -qxF "$key [$extras]" "$stamp" 2>/dev/null
}

txl_install() { # installs the caller's $extras
  local python others
  if ! "$TXL_PYTHON" -m pip --version >/dev/null 2>&1; then
    python="$(txl_find_python)" || return
    printf 'Making %s with %s\n' "$TXL_VENV" "$python" >&2
    txl_run "$python" -m venv "$TXL_VENV"
  fi
  # Extras of earlier runs stay recorded only if pyproject.toml and constraints.txt are still the same.
  others="$(grep -F "$key [" "$stamp" 2>/dev/null | grep -Ev "[[,]($forget)[],]" || true)"
  txl_run rm -f "$stamp"
  if [[ -n "$drop" ]]; then # JAX works with one CUDA plugin only
    txl_run "$TXL_PYTHON" -m pip --quiet uninstall --yes "jax-$drop-plugin" "jax-$drop-pjrt" >&2
  fi
  printf 'Installing txl_jax%s with the versions of launch/constraints.txt\n' "${extras:+[$extras]}" >&2
  local install=("$TXL_PYTHON" -m pip install --disable-pip-version-check --progress-bar off
    --constraint launch/constraints.txt --editable ".${extras:+[$extras]}")
  if [[ -n "${TXL_DRY_RUN-}" ]]; then txl_run "${install[@]}" && return; fi
  (cd "$root" && "${install[@]}") | txl_show_progress
  if [[ "${PIPESTATUS[0]}" != 0 ]]; then return 1; fi
  printf '%s\n' ${others:+"$others"} "$key [$extras]" >"$stamp"
}
