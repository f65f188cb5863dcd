#!/usr/bin/env bash
# Set up what is missing, then serve: mode `single` on an NVIDIA GPU, else `demo` on the CPU. Arguments and settings are
# those of `python -m qwen38_3090.serve` (--help lists them).
set -euo pipefail
cd "$(dirname "$0")/.."
stack=()
mode=${MODE-}
if [ -z "${MODE+set}" ] && [ -f .env ]; then
  mode=$(sed -n 's/^\(export \)\{0,1\}MODE=["'"'"']\{0,1\}\([a-z]*\).*/\2/p' .env | tail -n 1)
fi
if [ "$mode" = demo ]; then stack=(cpu); fi
python=$(bash scripts/setup.sh "${stack[@]}")
# ninja and the compilers that FlashInfer and Triton call are found beside this Python.
PATH="$(cd "$(dirname "$python")" && pwd):$PATH" exec "$python" -m qwen38_3090.serve "$@"
