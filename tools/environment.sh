# Sourced by other scripts: creates .venv if it is missing, installs the project
# into it if needed, and sets $python to its interpreter.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environment="$root/.venv"
python="$environment/bin/python"

# Extras of setup.cfg; scripts can set others.
extras="${extras:-test,examples}"

# Level of TensorFlow's C++ messages; 0 shows all.
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-2}"

# TensorFlow 2.21 has no wheels for newer versions of Python.
is_supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
    2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if is_supported "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "tfkfac needs Python 3.11, 3.12 or 3.13, but ${PYTHON:-python3} is:" \
    "$("${PYTHON:-python3}" --version 2>&1 | tail -n 1)." \
    "Install one, or name it: PYTHON=/path/to/python3.11 bash $0" >&2
  return 1
}

make_environment() {
  local base
  base="$(find_python)" || return 1
  echo "Making $environment with $("$base" --version)"
  if ! "$base" -m venv --clear "$environment"; then
    rm -rf "$environment"
    echo "$base cannot make virtual environments; on Debian and Ubuntu the" \
      "package python3-venv is missing." >&2
    return 1
  fi
}

# The installation depends on the dependencies, the interpreter, and the folder
# of the sources (the project is installed in editable form).
fingerprint() {
  {
    cat "$root/setup.cfg"
    "$python" --version
    echo "$root"
  } | cksum
}

install_project() {
  local stamp="$environment/installed-$extras"
  local wanted
  wanted="$(fingerprint)"
  if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
    return
  fi
  echo "Installing tfkfac and what it needs (TensorFlow is large)"
  "$python" -m pip install --quiet --disable-pip-version-check \
    --editable "$root[$extras]"
  echo "$wanted" >"$stamp"
}

is_supported "$python" || make_environment
install_project
