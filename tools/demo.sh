#!/usr/bin/env bash
# Trains an autoencoder of the embedded digits with K-FAC and, for the same
# processor seconds, with Adam, in .venv (made on the first run); shows what they
# make of digits and leaves a plot in demo/. With arguments it is the classifier
# of examples/ that is trained, by K-FAC, SGD and Adam, on N workers of this
# machine with --workers N, first: bash tools/demo.sh --workers 2 --epochs 5
set -euo pipefail
if [[ "${1:-}" == --workers && ! "${2:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "--workers needs a number: bash tools/demo.sh --workers 2" \
    "Received: ${2:-nothing}" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Without it a machine without a GPU is told so as an error.
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
  --dataset digits --model cnn --optimizer kfac sgd adam \
  --plot "$root/demo/digits.png" --log-dir "$root/demo" "$@"
