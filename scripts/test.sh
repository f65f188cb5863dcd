#!/usr/bin/env bash
# Set up what is missing, then run every test that this machine can run. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(bash scripts/setup.sh test)
"$python" -m ruff check .
"$python" -m ruff format --check .
exec "$python" -m pytest "$@"
