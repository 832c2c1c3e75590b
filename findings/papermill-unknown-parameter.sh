#!/usr/bin/env bash
# papermill 2.7.0 with ipykernel 7.4.0, Linux, Python 3.10 or newer; seen 2026-11-28 on Python 3.11.
#
# One would guess: a parameter that the notebook does not have is an error, as with any command's
# options.
# What happens: "Passed unknown parameter" is one line of the log, the notebook runs with its
# defaults, and the exit code is 0. A batch of jobs with one misspelt name trains the same run many
# times.
#     exit code 0, mbs 4
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile papermill==2.7.0 ipykernel==7.4.0

cat >"$T/notebook.py" <<'PY'
import sys

import nbformat

cells = [
    nbformat.v4.new_code_cell("mbs: int = 4", metadata={"tags": ["parameters"]}),
    nbformat.v4.new_code_cell("print('mbs', mbs)"),
]
kernel = {"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}}
nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), sys.argv[1])
PY
"$T/venv/bin/python" "$T/notebook.py" "$T/in.ipynb"
code=0
"$T/venv/bin/papermill" --no-progress-bar "$T/in.ipynb" "$T/out.ipynb" -p msb 8 2>"$T/log" \
    || code=$?
grep "unknown parameter" "$T/log"
echo "exit code $code, $(grep -o 'mbs [0-9]*' "$T/out.ipynb" | tail -1)"
[ "$code" = 0 ]
grep -q '"mbs 4' "$T/out.ipynb"
