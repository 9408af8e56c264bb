#!/usr/bin/env bash
# Sets up .venv once, then runs the experiments (or the tests, or JupyterLab) in it:
#
#   ./reproduce.sh [--profile pocket] [--seeds 5] ...   tables and figures; --help lists the rest
#   ./reproduce.sh status [--profile small] ...         what is done, runs, failed or is still to do
#   ./reproduce.sh test [pytest arguments]              the tests
#   ./reproduce.sh lab                                  the notebooks
#
# MAPL_PYTHON   the Python to use (3.11 or 3.12); default: the first that works
# MAPL_TORCH    cpu, cuda, or keep (whatever pip is set up to bring); default: the choice that .venv was made with, at
#               first cpu without an NVIDIA GPU and cuda with one
# MAPL_WHEELS   a folder of wheels to install from, without any network
# MAPL_TORCH_INDEX   where CPU builds of torch are looked for when pip's own sources have none
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
venv="$here/.venv"
python="$venv/bin/python"
torch_index="${MAPL_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 2; }

# True if $1 is a Python we support. A pyenv shim may exist and still fail: only running it tells.
supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; }

# Prints the path of a supported Python. 3.11 first: there the GPU packages and the notebook packages resolve together.
find_python() {
    local candidate
    if [ -n "${MAPL_PYTHON:-}" ]; then
        printf '%s\n' "$MAPL_PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[12].*/bin/python; do
        if supported "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

how_to_get_python() {
    say "error: no Python 3.11 or 3.12 found. Install one, then run this again:"
    case "$(uname -s)" in
        Darwin) say "    brew install python@3.11" ;;
        *)
            if command -v apt-get >/dev/null; then
                say "    sudo apt-get install -y python3.11 python3.11-venv"
                say "or, where that package does not exist (any Linux):"
            elif command -v dnf >/dev/null; then
                say "    sudo dnf install -y python3.11"
                say "or, where that package does not exist (any Linux):"
            fi
            say "    curl -LsSf https://astral.sh/uv/install.sh | sh"
            say "which brings uv; this script then lets it fetch Python 3.11 (open a new shell first, so that uv is found)."
            ;;
    esac
    exit 2
}

make_venv() {
    local base log
    if [ -e "$python" ] && supported "$python"; then return; fi
    rm -rf "$venv"
    if base="$(find_python)"; then
        if ! "$base" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            say "error: $base cannot make virtual environments; on Debian and Ubuntu that is a package of its own:"
            say "    sudo apt-get install -y $("$base" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
            exit 2
        fi
        say "Making .venv with $base"
        if ! log="$("$base" -m venv "$venv" 2>&1)"; then
            rm -rf "$venv"
            fail "could not make $venv: $log"
        fi
    elif command -v uv >/dev/null; then
        say "Making .venv with uv"
        uv venv --quiet --seed --python 3.11 "$venv" || { rm -rf "$venv"; how_to_get_python; }
    else
        how_to_get_python
    fi
}

pip_install() {
    if [ -n "${MAPL_WHEELS:-}" ]; then
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$MAPL_WHEELS" "$@"
    else
        "$python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

# cpu or cuda or keep: what was asked for, else what .venv was made with, else what this machine has.
choose_torch() {
    local made=""
    if [ -f "$venv/mapl-installed" ]; then read -r _ _ made _ <"$venv/mapl-installed" || true; fi
    case "${MAPL_TORCH:-}" in
        cpu | cuda | keep) printf '%s\n' "$MAPL_TORCH" ;;
        "")
            if [ -n "$made" ]; then
                printf '%s\n' "$made"
            elif [ "$(uname -s)" != Linux ]; then
                printf 'keep\n' # only on Linux does the plain wheel bring the CUDA libraries
            elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
                printf 'cuda\n'
            else
                printf 'cpu\n'
            fi
            ;;
        *) fail "MAPL_TORCH is '$MAPL_TORCH'; valid: cpu, cuda, keep" ;;
    esac
}

# The local part of the version of torch in .venv, such as +cpu or +cu130; empty if it has none, or torch is not there.
torch_build() {
    "$python" -c 'import importlib.metadata as m; print("".join(m.version("torch").partition("+")[1:]))' 2>/dev/null || true
}

# Brings torch as the pin wants it. The requirements accept any build of that version, so they leave it alone, and a
# build that is there already is replaced here or never.
install_torch() {
    local choice="$1" pin
    pin="$(grep -E '^torch==' "$here/requirements.txt")"
    if [ "$choice" = cuda ] && [ "$(torch_build)" = +cpu ]; then
        pip_install --force-reinstall --no-deps "$pin" || fail "pip could not replace the CPU build of torch; see above"
        if [ "$(torch_build)" = +cpu ]; then
            fail "MAPL_TORCH is cuda, but pip's own sources have a CPU build of torch only; correct them, or set MAPL_TORCH=cpu"
        fi
    fi
    if [ "$choice" != cpu ]; then
        say "torch: $choice ($([ "$choice" = cuda ] && echo 'an NVIDIA GPU' || echo "pip's own choice"); MAPL_TORCH=cpu changes it)"
    elif pip_install "$pin+cpu" 2>/dev/null; then
        say "torch: a CPU build, from pip's own sources (MAPL_TORCH=cuda changes it)"
    elif [ -z "${MAPL_WHEELS:-}" ] && pip_install --force-reinstall --no-deps --retries 0 --timeout 20 --index-url "$torch_index" "$pin" 2>/dev/null; then
        say "torch: a CPU build, from $torch_index (MAPL_TORCH=cuda changes it)"
    else
        say "torch: no CPU build to be had, so the plain one, which may bring gigabytes of CUDA libraries"
    fi
}

# Installs requirements.txt, the project and the given further files, each only if it changed since the last time.
install() {
    local choice base file line stamp="$venv/mapl-installed"
    choice="$(choose_torch)"
    base="$(cat "$here/pyproject.toml" "$here/requirements.txt" | cksum) $choice $here"
    if [ ! -f "$stamp" ] || [ "$(head -n 1 "$stamp")" != "$base" ]; then
        say "Installing packages into .venv (once; some minutes)"
        rm -f "$stamp"
        install_torch "$choice"
        pip_install -r "$here/requirements.txt" || fail "pip could not install requirements.txt; its message is above"
        pip_install --no-deps --no-build-isolation -e "$here" || fail "pip could not install mapl_core; see above"
        printf '%s\n' "$base" >"$stamp"
    fi
    for file in "$@"; do
        line="$(cksum <"$here/$file") $file"
        if ! grep -qxF "$line" "$stamp"; then
            say "Installing $file"
            pip_install -r "$here/$file" || fail "pip could not install $file; its message is above"
            printf '%s\n' "$line" >>"$stamp"
        fi
    done
}

main() {
    local argument profile="" previous="" base
    export JUPYTER_PREFER_ENV_PATH=1 PYTHONNOUSERSITE=1
    choose_torch >/dev/null
    if [ -n "${MAPL_PYTHON:-}" ] && ! supported "$MAPL_PYTHON"; then
        fail "MAPL_PYTHON is '$MAPL_PYTHON', which is not a working Python 3.11 or 3.12; correct or unset it"
    fi
    case "${1:-}" in
        test)
            shift
            make_venv
            install requirements-test.txt
            cd "$here"
            # The fast suite, and of the slow tests those that a change should never go without.
            exec env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
                "$python" -m pytest -n auto --maxprocesses 4 --dist worksteal -m "smoke or not (slow or nightly)" "$@"
            ;;
        status)
            # It writes nothing, so it does not set anything up either.
            [ -e "$venv/mapl-installed" ] || fail "nothing is set up here yet; ./reproduce.sh sets up and runs"
            exec "$python" -m mapl_core.reproduce "$@"
            ;;
        lab)
            shift
            make_venv
            install
            exec "$python" -m jupyterlab --notebook-dir "$here/notebooks" "$@"
            ;;
    esac
    for argument in "$@"; do
        case "$argument" in
            -h | --help | --list)
                base="$(find_python)" || how_to_get_python
                PYTHONPATH="$here" exec "$base" -m mapl_core.reproduce "$@"
                ;;
            --profile=*) profile="${argument#--profile=}" ;;
            *) [ "$previous" = --profile ] && profile="$argument" ;;
        esac
        previous="$argument"
    done
    if [ ! -e "$venv/mapl-installed" ] && base="$(find_python)"; then
        # A mistyped word should not cost an installation first.
        PYTHONPATH="$here" "$base" -m mapl_core.reproduce --check-arguments "$@" || exit $?
    fi
    make_venv
    if [[ "$profile" = paper* ]] && [ "$(choose_torch)" = cuda ]; then
        install requirements-gpu.txt
    else
        install
    fi
    exec "$python" -m mapl_core.reproduce "$@"
}

main "$@"
