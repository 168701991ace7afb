#!/usr/bin/env bash
# Make the environment of the checkout: tools/setup.sh FOLDER
#
# Every package comes at the version pinned in tools/requirements/. ENGINE=cpu|cuda overrides the
# choice of the engine; without it, a CUDA device that answers means cuda. On a machine without a
# GPU the engine is installed without its declared torchvision, torchaudio and torchcodec, which it
# does not need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:?"usage: tools/setup.sh FOLDER"}
pins=tools/requirements
python=${PYTHON:-python3}
steps=6 step=0

say() { step=$((step + 1)); printf '[setup %d/%d] %s\n' "$step" "$steps" "$1"; }
quiet=$([ -t 1 ] || echo --quiet) # someone who watches sees each package arrive
install() { "$venv/bin/python" -m pip --disable-pip-version-check install $quiet "$@"; }
. tools/numa.sh
has_cuda() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

command -v "$python" >/dev/null || { echo "setup: no $python found; set PYTHON=..." >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: $("$python" -V) is too old; Python 3.11 or newer is needed (set PYTHON=...)" >&2
    exit 1
}
engine=${ENGINE:-$(if has_cuda; then echo cuda; else echo cpu; fi)}
case $engine in cpu | cuda) ;; *)
    echo "setup: ENGINE is \"$engine\"; it must be cpu or cuda" >&2
    exit 1
    ;;
esac

say "virtual environment $venv with $("$python" -V)"
"$python" -m venv --clear "$venv"
say "torch"
install -r "$pins/torch.txt"
say "dependencies ($(grep -c == "$pins/run.txt") packages)"
install -r "$pins/run.txt"
say "tools for tests and checks ($(grep -c == "$pins/dev.txt") packages)"
install -r "$pins/dev.txt"
say "engine for $engine: $(grep '^vllm' "$pins/$engine.txt")"
if [ "$engine" = cuda ]; then
    install -c "$pins/run.txt" -c "$pins/torch.txt" -r "$pins/cuda.txt"
else
    install --no-deps -r "$pins/cpu.txt"
    has_numa || add_numa
    has_numa || {
        echo "setup: the engine needs libnuma.so.1; install it (Debian: libnuma1), and repeat" >&2
        exit 1
    }
fi
say "kvcascade itself"
install --no-deps --no-build-isolation --editable .
