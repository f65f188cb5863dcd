#!/usr/bin/env bash
# Check this installation: environment, patches, weights and, if one runs, the server. --help lists the options.
# Takes the Python that scripts/serve.sh would take, else PYTHON or python3 (as in the image).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
venvs=("${VENV:-.venv}" .venv-cuda .venv-cpu)
if [ "${MODE:-}" = demo ]; then venvs=("${VENV:-.venv-cpu}" .venv); fi
python=${PYTHON:-python3}
for venv in "${venvs[@]}"; do
  if [ -x "$venv/bin/python" ]; then python=$venv/bin/python && break; fi
done
exec "$python" -m qwen38_3090.doctor "$@"
