#!/usr/bin/env bash
# Lints, type-checks and tests, in .venv (created in the first run).
#   --all       runs slow tests, too
#   --clusters  installs real launchers and runs their tests only; for root
# Other arguments go to pytest, which runs tests in several processes:
#   bash tools/test.sh tests/kfac -k clip
#   bash tools/test.sh tests/kfac -n 0 --pdb
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# One process more than cores, at most 4: some wait for clusters. Each, with the
# cluster that it started, takes up to 4 GB.
processes=$(($(nproc) < 3 ? $(nproc) + 1 : 4))
arguments=(--numprocesses "$processes" --durations 20)
slow_ones_too=false
clusters_only=false
for argument in "$@"; do
  case "$argument" in
    --all) slow_ones_too=true ;;
    --clusters) clusters_only=true ;;
    *) arguments+=("$argument") ;;
  esac
done

# The processes share the cores; TensorFlow would start threads for all cores
# in each process.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TF_NUM_INTRAOP_THREADS="${TF_NUM_INTRAOP_THREADS:-1}"
export TF_NUM_INTEROP_THREADS="${TF_NUM_INTEROP_THREADS:-4}"

cd "$root"
if "$clusters_only"; then
  bash tools/clusters.sh
  exec "$python" -m pytest "${arguments[@]}" --numprocesses 0 -m clusters \
    tests/cluster/test_real_launchers.py
fi
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
status=0
"$python" -m pytest "${arguments[@]}" || status=$?
if "$slow_ones_too"; then
  # In new processes: graphs of all tests together take too much memory.
  "$python" -m pytest "${arguments[@]}" -m slow || status=$?
fi
exit "$status"
