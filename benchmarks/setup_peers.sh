#!/usr/bin/env bash
# Makes the environment in which gruppo is measured against its peers:
#
#     benchmarks/setup_peers.sh .venv-bench          PYTHON=python3.12 benchmarks/setup_peers.sh .venv-bench
#
# gruppo itself (editable) comes with the pinned set of constraints.txt. The peers come without their dependencies,
# because those clash with the set (twinkle-kit 0.5.1 asks for numpy < 2.3 and peft <= 0.19) and are mostly servers and
# clients; installed beside them is only what their loss and metric modules import. Nothing here reaches .venv.
# A second call does nothing until this file, pyproject.toml or constraints.txt changes.
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: [PYTHON=python3] $0 VENV_DIR" >&2
    exit 2
fi
python=${PYTHON:-python3}
script=$(realpath "$0")
venv=$(realpath -m "$1")
[[ $python != */* ]] || python=$(realpath -s "$python")
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    echo "$python is $("$python" --version); twinkle-kit 0.5.1 runs on Python 3.11 and 3.12: set PYTHON to one of them" >&2
    exit 1
}

stamp=$(cat "$script" pyproject.toml constraints.txt | cksum)
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

# datasets and pandas: what trl.trainer.grpo_trainer imports; requests: what twinkle.utils imports.
pip install --constraint constraints.txt --editable '.[train]' \
    accelerate datasets pandas \
    requests==2.34.2 charset-normalizer==3.5.2 urllib3==2.8.0
pip install --no-deps twinkle-kit==0.5.1 trl==1.16.0

"$venv/bin/python" -c 'import gruppo.loss, trl.trainer.grpo_trainer, twinkle.loss.grpo, twinkle.metric.grpo'
echo "$stamp" >"$venv/.installed"
