#!/usr/bin/env bash
# The container's verbs; the last command of each replaces this shell, so that it gets the container's signals.
#
#   serve [VLLM OPTION...]   check the installation and the weights, then serve (the default; options alone mean this)
#   prepare                  download the weights that are missing
#   verify [OPTION...]       verify.sh
#   anything else            run as it stands
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-serve} in
  -*) verb=serve ;;
  *) verb=${1:-serve}; shift $(($# > 0)) ;;
esac

case $verb in
  serve)
    # In the background, because a shell that waits for a program in the foreground ignores signals meanwhile.
    bash verify.sh --no-server &
    check=$!
    trap 'kill "$check"; exit 143' TERM INT
    wait "$check"
    exec python -m qwen38_3090.serve "$@"
    ;;
  prepare) exec python docker/prepare.py "$@" ;;
  verify) exec bash verify.sh "$@" ;;
  *) exec "$verb" "$@" ;;
esac
