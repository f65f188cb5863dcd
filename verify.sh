#!/usr/bin/env bash
# Check this installation: environment, patches, weights and, if one runs, the server. --help lists the options.
# Takes the Python that scripts/serve.sh would take, else PYTHON or python3 (as in the image).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
venvs=("${VENV:-.venv}" .venv-cuda .venv-cpu)
if [ "${MODE:-}" = demo ]; then venvs=("${VENV:-.venv-cpu}" .venv); fi
for venv in "${venvs[@]}"; do
  if [ -x "$venv/bin/python" ]; then exec "$venv/bin/python" -m qwen38_3090.doctor "$@"; fi
done
python=${PYTHON:-python3}
if ! "$python" -c 'import qwen38_3090.doctor, qwen38_3090.patches' >/dev/null 2>&1; then
  echo "verify.sh: nothing is installed yet; run: bash scripts/setup.sh" >&2
  exit 1
fi
exec "$python" -m qwen38_3090.doctor "$@"
