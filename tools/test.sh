#!/usr/bin/env bash
# Lints, type-checks and tests, in .venv (made on the first run).
# Arguments go to pytest: bash tools/test.sh -m slow
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" -m pytest "$@"
