# Sourced by the other scripts: makes sure `$PYTHON` has this project and what it needs.
#
#   prepare_python EXTRAS     EXTRAS as in pyproject.toml, e.g. "" or "dev"
#
# PYTHON=/path/python   create the virtual environment with this interpreter and no other
# VENV=folder           where it goes (default .venv); VENV=none uses $PYTHON as it is
# PACKAGES=...          further packages to install, as pip takes them
# CONSTRAINTS=file      the versions to install (default constraints.txt)
# TORCH=version         another torch than that file's, with the Triton that fits it. The environment
#                       keeps it until a call names another torch; nightly is for .ci/install
# The install is skipped when nothing it depends on has changed, so a second run starts at once.

find_python() {
  local candidate candidates=(python3.13 python3.12 python3.11 python3 python)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "Python 3.11 or newer is needed, and ${PYTHON:-none on the PATH} is not;" \
    "set PYTHON=/path/to/python" >&2
  return 1
}

# Prints the constraints file $1 with torch $2 and its Triton, or without both for a nightly build.
constraints_for() {
  local root triton
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  triton="$(sed -n "s/^ *\"$2\": \"\(.*\)\",$/triton==\1/p" "$root/torchtitan/tools/torch_versions.py")"
  if [ "$2" = nightly ]; then
    sed '/^torch==/d; /^triton==/d' "$1"
  else
    sed "s/^torch==.*/torch==$2/; s/^triton==.*/$triton/" "$1"
  fi
}

prepare_python() {
  local extras="$1" root venv stamp wanted constraints torch
  root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
  venv="${VENV:-$root/.venv}"
  constraints="${CONSTRAINTS:-constraints.txt}"
  [ "${constraints#/}" != "$constraints" ] || constraints="$root/$constraints"
  if [ "$venv" = none ]; then
    PYTHON="$(find_python)" || return 1
    return
  fi
  stamp="$venv/.installed-${extras:-runtime}"
  torch="${TORCH:-$(cat "$venv/torch.txt" 2>/dev/null || sed -n 's/^torch==//p' "$constraints")}"
  wanted="$(constraints_for "$constraints" "$torch" | cat "$root/pyproject.toml" - | cksum) $root"
  # Each extra brings the runtime, too.
  if ! grep -qsxF -- "$wanted" "$venv/.installed-"${extras:-*}; then
    if [ ! -x "$venv/bin/python" ]; then
      PYTHON="$(find_python)" || return 1
      echo "creating a virtual environment in $venv" >&2
      "$PYTHON" -m venv "$venv" || return 1
    fi
    echo "installing (once; a few minutes)" >&2
    # The pip that Python 3.11 brings takes twice as long to choose versions.
    "$venv/bin/python" -m pip install --quiet --upgrade pip || true
    # A line for each package that is fetched, and pip's own for everything that goes wrong.
    constraints_for "$constraints" "$torch" >"$venv/constraints.txt"
    [ -z "${TORCH:-}" ] || echo "$torch" >"$venv/torch.txt"
    rm -f "$venv/.installed-"*
    "$venv/bin/python" -m pip install --no-compile --constraint "$venv/constraints.txt" \
      --editable "$root${extras:+[$extras]}" ${PACKAGES:-} |
      sed -un 's/^Collecting \([^ ]*\).*/  \1/p; s/^\(Installing\) collected.*/  \1 them all/p' >&2
    [ "${PIPESTATUS[0]}" = 0 ] || return 1
    # On all cores, while pip uses one. Packages have templates that are not Python, and a third of
    # their code is their own tests and families of models that hardly anything imports.
    "$venv/bin/python" -m compileall -qq -j 0 -x '/tests?/|/transformers/models/' "$venv/lib" || true
    echo "$wanted" >"$stamp"
  fi
  PYTHON="$venv/bin/python"
}
