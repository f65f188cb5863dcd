#!/usr/bin/env bash
# Remake constraints.txt from pyproject.toml's extras: one set of versions for every Python and both stacks. Needs uv.
set -euo pipefail
cd "$(dirname "$0")/.."
{
  echo "# Every version this project installs, for Python 3.10 to 3.13. Made by scripts/lock.sh; used by scripts/setup.sh."
  uv pip compile pyproject.toml --extra cpu --extra cuda --extra test --universal --python-version 3.10 \
    --no-header --no-annotate --quiet
} >constraints.txt.new
mv constraints.txt.new constraints.txt
