#!/usr/bin/env bash
# Builds the documentation into docs/site, in .venv (made on the first run),
# without the network. A broken link or a public name without a page is an error.
# Arguments go to MkDocs: bash tools/docs.sh --site-dir /tmp/site
set -euo pipefail
extras=docs
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

cd "$root"
"$python" tools/results.py
# Not --quiet: warnings would not be counted, and so be no errors.
NO_MKDOCS_2_WARNING=1 exec "$python" -m mkdocs build --strict \
  --config-file docs/mkdocs.yml "$@"
