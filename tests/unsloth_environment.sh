#!/usr/bin/env bash
# Makes the environment of the tests marked `unsloth`: tests/unsloth_environment.sh [FOLDER], by default .venv-unsloth
#
# With a GPU that is all of requirements-gpu.txt. Without one Unsloth is installed without its dependencies, which would
# bring CUDA libraries by the gigabyte, and then the few that its CPU build imports.
#
# MAPL_PYTHON        a Python 3.11 or 3.12; default: python3.11
# MAPL_TORCH_INDEX   where CPU builds of torch are looked for when pip's own sources have none
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
folder="${1:-$root/.venv-unsloth}"
"${MAPL_PYTHON:-python3.11}" -m venv "$folder"

install() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pin() { grep -E "^$1==" "$root/$2"; }

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    install -r "$root/requirements-gpu.txt" -r "$root/requirements-test.txt"
else
    torch="$(pin torch requirements.txt)"
    install "$torch+cpu" 2>/dev/null ||
        install --index-url "${MAPL_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$torch"
    install -r "$root/requirements-test.txt" "$(pin bitsandbytes requirements-gpu.txt)"
    install --no-deps "$(pin unsloth requirements-gpu.txt)" "$(pin unsloth_zoo requirements-gpu.txt)"
    install tyro sentencepiece hf_transfer cut_cross_entropy einops msgspec protobuf structlog nest-asyncio json5 diffusers
fi
echo "done: $folder/bin/python -m pytest tests/test_four_bit.py -m unsloth"
