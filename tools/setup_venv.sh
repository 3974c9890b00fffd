#!/bin/sh
# Makes the virtual environment $1 with the pinned dependencies and jaxcap itself in it (editable),
# or does nothing where it already is what pyproject.toml and constraints.txt ask for. With a second
# argument, "compile", also what compiles kernels without a GPU (tools/compile-tools.txt).
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python="$venv/bin/python"
stamp="$venv/.jaxcap-set-up"
unfinished="$venv/.jaxcap-unfinished"

# The folder counts too: the editable install points at it.
wanted="$(cat pyproject.toml constraints.txt tools/setup_venv.sh | cksum) $(pwd -P)"

# Two makes at once must not build on top of each other.
if command -v flock >/dev/null 2>&1; then
    exec 9<pyproject.toml
    flock 9
fi

works() { "$python" -c "import pip" >/dev/null 2>&1; }

# Into a folder of its own: in the environment itself JAX would look for a GPU at every start.
compile_tools() {
    folder="$venv/compile-tools"
    if [ "$1" = compile ] && ! cmp -s tools/compile-tools.txt "$folder/installed.txt"; then
        echo "==> Installing what compiles kernels without a GPU into $folder (190 MB)"
        rm -rf "$folder"
        "$python" -m pip install --disable-pip-version-check --no-deps --target "$folder" \
            -r tools/compile-tools.txt
        cp tools/compile-tools.txt "$folder/installed.txt"
    fi
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && works; then
    compile_tools "${2:-}"
    exit 0
fi
if [ -e "$venv" ] && { [ -e "$unfinished" ] || ! works; }; then
    echo "==> $venv is broken or half made: making it anew"
    rm -f "$stamp" # first: an interrupted rm must not look finished
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    base=$(tools/find_python.sh)
    echo "==> Making $venv with $base ($("$base" -c 'import platform; print(platform.python_version())'))"
    mkdir -p "$venv"
    : >"$unfinished"
    "$base" -m venv "$venv"
fi
rm -f "$stamp"
: >"$unfinished"
echo "==> Installing jaxcap, JAX, Flax and the tools into $venv (a few minutes on a new machine)"
"$python" -m pip install --disable-pip-version-check -c constraints.txt -e '.[examples,test]'
rm -f "$unfinished"
compile_tools "${2:-}"
echo "$wanted" >"$stamp"
echo "==> $venv is ready"
