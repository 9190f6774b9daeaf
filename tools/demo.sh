#!/usr/bin/env bash
# Trains on the embedded digits with K-FAC, SGD and Adam, in .venv (made on the
# first run), and leaves a plot and CSV files in demo/.
# With --workers N, first, on N workers of this machine. Other arguments are
# added to the example's: bash tools/demo.sh --workers 2 --epochs 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

launch=()
if [[ "${1:-}" == --workers ]]; then
  launch=("$python" "$root/tools/launch.py" "${2:?--workers needs a number}" --)
  shift 2
fi

# Without it a machine without a GPU is told so as an error.
export TF_CPP_MIN_LOG_LEVEL=3
"${launch[@]}" "$python" "$root/examples/train_classifier.py" \
  --dataset digits --model cnn --optimizer kfac sgd adam \
  --plot "$root/demo/digits.png" --log-dir "$root/demo" "$@"
