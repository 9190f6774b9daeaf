#!/usr/bin/env bash
# Trains on the embedded digits with K-FAC, SGD and Adam, in .venv (made on the
# first run), and leaves a plot and CSV files in demo/.
# Arguments are added to the example's: bash tools/demo.sh --epochs 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# Without it a machine without a GPU is told so as an error.
export TF_CPP_MIN_LOG_LEVEL=3
"$python" "$root/examples/train_classifier.py" \
  --dataset digits --model cnn --optimizer kfac sgd adam \
  --plot "$root/demo/digits.png" --log-dir "$root/demo" "$@"
