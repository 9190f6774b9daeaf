#!/usr/bin/env bash
# Trains an autoencoder of the embedded digits with KFAC() and, for the same
# processor seconds, with Adam, in .venv (created in the first run). Shows
# reconstructed digits and writes a plot to demo/. With arguments it trains the
# classifier of examples/ with K-FAC, SGD and Adam; --workers N, the first
# argument, starts N workers: bash tools/demo.sh --workers 2 --epochs 5
set -euo pipefail
if [[ "${1:-}" == --workers && ! "${2:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "--workers needs a number: bash tools/demo.sh --workers 2" \
    "Received: ${2:-nothing}" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Else TensorFlow reports an error on machines without a GPU.
export TF_CPP_MIN_LOG_LEVEL=3
if (($# == 0)); then
  exec "$python" "$root/tools/demo.py" "$root/demo/digits.png"
fi

launch=()
if [[ "$1" == --workers ]]; then
  launch=("$python" "$root/tools/launch.py" "$2" --)
  shift 2
fi
"${launch[@]}" "$python" "$root/examples/classification.py" \
  --optimizer kfac sgd adam "$@"
