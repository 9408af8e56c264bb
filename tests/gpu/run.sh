#!/usr/bin/env bash
# One iteration of MADPO and of MARLHF on this machine's GPU: tokens a second, peak memory, MFU. No network, and at most
# six minutes; with plain 16-bit weights first, then with those 4-bit loaders whose packages are installed.
#
#     tests/gpu/run.sh [FOLDER]              writes to FOLDER, by default docs/runs/gpu-DATE
#     tests/gpu/run.sh --dry-run [FOLDER]    tiny sizes on a CPU; by default to a temporary folder
#
# MAPL_PYTHON   the Python to use; default: that of .venv, else python3
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
minutes=6

dry=()
if [ "${1:-}" = --dry-run ]; then
    dry=(--dry-run)
    shift
fi
folder="${1:-}"
if [ -z "$folder" ]; then
    if [ "${#dry[@]}" -gt 0 ]; then folder="$(mktemp -d)"; else folder="docs/runs/gpu-$(date +%F)"; fi
fi
python="${MAPL_PYTHON:-}"
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi

failed=()
for loader in plain bnb4 unsloth; do
    left=$((60 * minutes - SECONDS))
    if ! missing="$("$python" -c "from mapl_core.model_names import check_loader; check_loader('$loader')" 2>&1)"; then
        echo "$loader: left out (${missing##*ImportError: })"
    elif [ "$left" -lt 30 ]; then
        echo "$loader: left out, no time left"
    else
        # A process for each: Unsloth changes the libraries of the one that imports it.
        timeout "$left" "$python" tests/gpu/measure.py --out "$folder" --loader "$loader" ${dry[@]+"${dry[@]}"} ||
            failed+=("$loader")
    fi
done
echo "$SECONDS seconds; numbers in $folder"
if [ "${#failed[@]}" -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
