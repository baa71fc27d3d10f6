# Makes the project's virtual environment unless it exists. The other scripts here source this file.
#
#   PYTHON      the Python to make it with; unset: the first of python3, python3.14 … python3.11
#               that is 3.11 or newer and can make virtual environments
#   TXL_VENV    the environment's folder; unset: .venv at the root of the repository
#   TXL_EXTRAS  optional dependencies, e.g. "cuda13" or "tpu"; unset: where `nvidia-smi -L` finds a
#               GPU, "cuda13" or "cuda12" by its driver, else none; empty: none, even beside a GPU
#   JAX_PLATFORMS  unset: a GPU or TPU that the extras are for must start, or the program ends
#   TXL_DRY_RUN if not empty: this script and the others print every command instead of running it
#
# Versions are those of launch/constraints.txt. $TXL_VENV/txl-installed records the extras that were
# installed and a hash of the files with their versions, so that a second run starts at once.
# shellcheck shell=bash

txl_run() { # txl_run COMMAND...: runs it; where TXL_DRY_RUN is set, prints it, quoted for a shell
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

txl_launched_by() { # txl_launched_by COMMAND...: the command that the program names to resume a run
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
    # CUDA 13 has no GPU below compute capability 7.5, such as a V100
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

txl_require() { # txl_require PLATFORM: JAX must start it; if it does not, the program says why
  if [[ -z "${JAX_PLATFORMS+set}" ]]; then txl_run export "JAX_PLATFORMS=$1,cpu"; fi
}

txl_require_extras() { # JAX must start what the extras are for
  case " ${TXL_EXTRAS-} " in
    *[\ ,]cuda1[23][\ ,]*) txl_require cuda ;;
    *[\ ,]tpu[\ ,]*) txl_require tpu ;;
  esac
}

txl_name_env() { # txl_name_env ROOT: sets $TXL_VENV, $TXL_PYTHON, and the caller's stamp and key
  TXL_VENV="${TXL_VENV:-$1/.venv}"
  if [[ "$TXL_VENV" != /* ]]; then TXL_VENV="$PWD/$TXL_VENV"; fi
  TXL_PYTHON="$TXL_VENV/bin/python"
  stamp="$TXL_VENV/txl-installed"
  key="$(cat "$1/pyproject.toml" "$1/launch/constraints.txt" | cksum) $1"
}

txl_use_env() { # txl_use_env ROOT: sets $TXL_PYTHON; fails if no environment was made for this GPU
  local key stamp wanted=cuda13 word pattern made lacks=""
  txl_name_env "$1"
  if [[ -n "${TXL_DRY_RUN-}" ]]; then return; fi
  if nvidia-smi -L >/dev/null 2>&1; then wanted="$(txl_cuda_extra)" || return; fi
  wanted="${TXL_EXTRAS-$wanted}"
  made="$(grep -F "$key [" "$stamp" 2>/dev/null || true)"
  if [[ -z "$made" || ! -x "$TXL_PYTHON" ]]; then lacks=yes; fi
  for word in ${wanted//,/ }; do
    pattern="$word"
    if [[ "$word" == cuda13 && -z "${TXL_EXTRAS+set}" ]]; then
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
  local root="$1" extras key others python stamp drop
  shift
  if [[ -z "${TXL_EXTRAS+set}" ]] && nvidia-smi -L >/dev/null 2>&1; then
    TXL_EXTRAS="$(txl_cuda_extra)" || return
  fi
  extras="$(tr -s '[:space:],' '[\n*]' <<<"$* ${TXL_EXTRAS-}" | sed '/^$/d' | sort -u | paste -sd, -)"
  case ",$extras," in
    *,cuda12,cuda13,*)
      printf 'TXL_EXTRAS=%s: give cuda12 or cuda13, not both\n' "$extras" >&2
      return 1
      ;;
    *,cuda12,*) drop=cuda13 ;;
    *,cuda13,*) drop=cuda12 ;;
    *) drop="" ;;
  esac
  txl_name_env "$root"
  if [[ -x "$TXL_PYTHON" ]] && grep -qxF "$key [$extras]" "$stamp" 2>/dev/null; then return; fi

  if ! "$TXL_PYTHON" -m pip --version >/dev/null 2>&1; then
    python="$(txl_find_python)" || return
    printf 'Making %s with %s\n' "$TXL_VENV" "$python" >&2
    txl_run "$python" -m venv "$TXL_VENV"
  fi
  # Other extras stay recorded only if they were installed from these same files.
  others="$(grep -F "$key [" "$stamp" 2>/dev/null | grep -v "[[,]${drop:-none}[],]" || true)"
  txl_run rm -f "$stamp"
  if [[ -n "$drop" ]]; then # JAX takes one CUDA plugin
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
