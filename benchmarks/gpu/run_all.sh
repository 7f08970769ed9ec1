#!/bin/sh
# The GPU kit in one call (under 8 minutes on one H200): benchmarks/gpu/run_all.sh [--device cpu] [--quick] [--output FILE]
# PYTHON names the interpreter; the default is python.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here:$here/../..:$here/../../schemas${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" "$here/run_all.py" "$@"
