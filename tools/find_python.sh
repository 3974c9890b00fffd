#!/bin/sh
# Prints the interpreter to build the virtual environment with: a Python >= 3.12 that really runs
# and has venv and ensurepip. 3.12 first, where the pins were made; then the newer ones.
# Looks on PATH, in pyenv and among uv's. Without any: one line on stderr, exit status 1.
set -u

# A name proves nothing: pyenv's shims exist for versions that are not active, and Debian splits
# venv off. From inside a virtual environment, answers with the interpreter that it was made from.
probe='
import sys
if sys.version_info < (3, 12):
    raise SystemExit(1)
import ensurepip, venv
print(sys.version_info[1], getattr(sys, "_base_executable", None) or sys.executable)
'

candidates() {
    names="python3.12 python3.13 python3.14 python3.15 python3 python"
    old_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        IFS=$old_ifs
        for name in $names; do
            echo "${folder:-.}/$name"
        done
    done
    IFS=$old_ifs

    pyenv_root=${PYENV_ROOT:-}
    if [ -z "$pyenv_root" ] && command -v pyenv >/dev/null 2>&1; then
        pyenv_root=$(pyenv root 2>/dev/null)
    fi
    for found in "${pyenv_root:-${HOME:-}/.pyenv}"/versions/*/bin/python; do
        echo "$found"
    done

    if command -v uv >/dev/null 2>&1; then
        UV_PYTHON_DOWNLOADS=never uv python find --system '>=3.12' 2>/dev/null
    fi
    uv_root=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}
    for found in "$uv_root"/*/bin/python3; do
        echo "$found"
    done
}

best=$(
    candidates | while IFS= read -r candidate; do
        [ -f "$candidate" ] && [ -x "$candidate" ] || continue
        answer=$("$candidate" -c "$probe" 2>/dev/null </dev/null) || continue
        echo "$answer"
        case $answer in "12 "*) break ;; esac
    done | sort -s -n -k1,1 | head -n 1
)
if [ -z "$best" ]; then
    echo "jaxcap needs Python 3.12 or newer with venv; install one, for example with" \
        "'apt install python3.12-venv', 'pyenv install 3.12' or 'uv python install 3.12'." >&2
    exit 1
fi
echo "${best#* }"
