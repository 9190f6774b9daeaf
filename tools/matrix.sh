#!/usr/bin/env bash
# Runs the quick set of tests (tests/quick.txt) with each Python, TensorFlow and
# Keras that setup.cfg allows, and with nightly versions, which may fail. Writes the
# results to docs/matrix.json, the source of a table of the results page.
#   bash tools/matrix.sh [FOLDER]
# The environments are created in FOLDER, by default build/matrix. Interpreters are
# found by name (python3.12); a missing one is skipped with a message.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(mkdir -p "${1:-$root/build/matrix}" && cd "${1:-$root/build/matrix}" && pwd)"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

record() { # PYTHON REPORT
  "$1" - "$2" "$root/docs/matrix.json" <<'PYTHON'
import importlib.metadata, json, pathlib, platform, sys
import xml.etree.ElementTree as xml

suites = xml.parse(sys.argv[1]).getroot()[0].attrib
row = {"python": platform.python_version()}
for name in ("tensorflow", "tf-nightly", "keras", "keras-nightly"):
    try:
        row[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
failed = int(suites["failures"]) + int(suites["errors"])
skipped = int(suites["skipped"])
row["passed"] = int(suites["tests"]) - failed - skipped
row |= {"failed": failed, "skipped": skipped}
path = pathlib.Path(sys.argv[2])
rows = json.loads(path.read_text()) if path.exists() else []
own = {k: v for k, v in row.items() if isinstance(v, str)}
rows = [r for r in rows if {k: r.get(k) for k in own} != own] + [row]
path.write_text("[" + ",\n ".join(map(json.dumps, rows)) + "]\n")
print(*row.values())
PYTHON
}

# Runs the quick set in a new environment. A failure with NEXT, a nightly
# package, is no failure of this script.
try() { # NUMBER PYTHON NEXT PACKAGE...
  local environment="$folder/$1" python="$2" next="$3"
  shift 3
  if ! "$python" -c "" 2>/dev/null; then
    echo "left out: $python, which is not there"
    return
  fi
  echo "$python with $* $next"
  "$python" -m venv --clear "$environment"
  local pip=("$environment/bin/python" -m pip install --quiet
    --disable-pip-version-check)
  "${pip[@]}" "$root[test]" "$@"
  if [[ -n "$next" ]]; then # a nightly package has the same module
    "$environment/bin/python" -m pip uninstall --quiet --yes \
      "$([[ "$next" == keras* ]] && echo keras || echo tensorflow)"
    "${pip[@]}" --pre --no-deps --force-reinstall "$next"
  fi
  local report="$environment/report.xml" status=0
  (cd "$root" && "$environment/bin/python" -m pytest -q -p no:cacheprovider \
    --junitxml "$report" @tests/quick.txt) || status=$?
  record "$environment/bin/python" "$report"
  [[ -n "$next" ]] || return "$status"
}

status=0
try 1 python3.11 "" "tensorflow==2.21.*" "keras==3.15.*" || status=1
try 2 python3.12 "" "tensorflow==2.21.*" "keras==3.15.*" || status=1
try 3 python3.13 "" "tensorflow==2.21.*" "keras==3.15.*" || status=1
try 4 python3.11 "" "tensorflow==2.20.*" "keras==3.14.*" || status=1
# Release candidates of TensorFlow depend on keras-nightly: install without it.
try 5 python3.11 "tensorflow==2.22.0rc0" "keras==3.15.*" || status=1
try 6 python3.11 keras-nightly "tensorflow==2.21.*" || status=1
try 7 python3.11 tf-nightly "keras==3.15.*" || status=1
exit "$status"
