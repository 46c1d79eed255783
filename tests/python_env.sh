# Sourced. need_python EXTRA MODULE… sets PYTHON to an interpreter that has all the modules: one that is there
# already ($PYTHON where given; .venv in the checkout, python3, python), else .venv, into which megazero[EXTRA] is
# installed. Fails with what is missing and what would help.

_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Prints what interpreter $1 lacks of the modules that follow; nothing where it has them all.
_missing() {
    local python=$1
    shift
    "$python" - "$@" 2>/dev/null <<'PY' || echo "a working Python"
import importlib.util
import sys
from importlib.metadata import version


def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


lacking = [name for name in sys.argv[1:] if not there(name)]
if sys.version_info < (3, 10):
    lacking.append("Python 3.10 or later")
if "torch" not in lacking and tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2]) < (2, 11):
    lacking.append("torch 2.11 or later")
print(*lacking, sep=", ")
PY
}

_make_venv() {
    local extra=$1 base
    if ! "$_ROOT/.venv/bin/python" -m pip --version >/dev/null 2>&1; then  # none, or one cut off half-made
        for base in python3 python3.13 python3.12 python3.11 python3.10; do
            "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break
            base=
        done
        if [ -z "$base" ]; then
            echo "megazero needs Python 3.10 or later, and no python3 here is." >&2
            return 1
        fi
        if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$(command -v "$base") cannot make a virtual environment: ensurepip is missing." >&2
            echo "On Debian and Ubuntu: apt-get install python3-venv" >&2
            return 1
        fi
        echo "Making $_ROOT/.venv …" >&2
        "$base" -m venv "$_ROOT/.venv" || return 1
    fi
    echo "Installing megazero[$extra] into $_ROOT/.venv …" >&2
    # Half the time goes into compiling modules that nothing imports; the first import of one compiles it as well.
    local compile=--no-compile
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || compile=--compile
    "$_ROOT/.venv/bin/python" -m pip install --quiet --disable-pip-version-check "$compile" \
        -c "$_ROOT/constraints.txt" -e "$_ROOT[$extra]" >&2
}

_find_python() {
    local extra=$1 candidate lacking report=""
    shift
    if [ -n "${PYTHON:-}" ]; then
        lacking=$(_missing "$PYTHON" "$@")
        [ -z "$lacking" ] || echo "PYTHON=$PYTHON lacks $lacking" >&2
        [ -z "$lacking" ]
        return
    fi
    for candidate in "$_ROOT/.venv/bin/python" python3 python; do
        command -v "$candidate" >/dev/null || continue
        lacking=$(_missing "$candidate" "$@")
        if [ -z "$lacking" ]; then
            PYTHON=$candidate
            return 0
        fi
        report+="  $(command -v "$candidate") lacks $lacking"$'\n'
    done
    if ! _make_venv "$extra"; then
        printf 'No Python here has all that is needed, and it could not be installed:\n%s' "$report" >&2
        return 1
    fi
    PYTHON=$_ROOT/.venv/bin/python
    lacking=$(_missing "$PYTHON" "$@")
    [ -z "$lacking" ] || echo "$PYTHON still lacks $lacking after the installation." >&2
    [ -z "$lacking" ]
}

need_python() {
    local status=0
    # One at a time, so that nobody takes a half-made .venv for a whole one. The lock is on the directory: no file is
    # left behind. Without flock, or on a disk without locks, runs must not start together.
    exec 9<"$_ROOT"
    flock 9 2>/dev/null || true
    _find_python "$@" || status=$?
    exec 9<&-
    return "$status"
}
