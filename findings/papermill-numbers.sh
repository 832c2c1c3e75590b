#!/usr/bin/env bash
# papermill 2.7.0 with ipykernel 7.4.0, Linux, Python 3.10 or newer; seen 2026-11-28 on Python 3.11.
#
# One would guess: a parameter arrives as what the notebook's annotation says, or at least the same
# from -p and from a YAML file.
# What happens: annotations are not looked at, and the two ways read other numbers. -p takes what
# float() and int() take: a run id such as a short commit hash becomes inf or a number. YAML is 1.1:
# a learning rate without a point is text, and a time limit is seconds.
#     lr: float from `-p lr 1e-4` is 0.0001, from YAML `lr: 1e-4` it is '1e-4'
#     run: str from `-p run 12e4567` is inf; limit: str from YAML `limit: 1:30:00` is 5400
# (-r passes text; in YAML 1.0e-4 and quotes help.)
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile papermill==2.7.0 ipykernel==7.4.0

cat >"$T/notebook.py" <<'PY'
import sys

import nbformat

defaults = "lr: float = 1.0\nrun: str = 'none'\nlimit: str = 'none'"
cells = [
    nbformat.v4.new_code_cell(defaults, metadata={"tags": ["parameters"]}),
    nbformat.v4.new_code_cell("print([lr, run, limit])"),
]
kernel = {"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}}
nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), sys.argv[1])
PY
"$T/venv/bin/python" "$T/notebook.py" "$T/in.ipynb"
cat >"$T/printed.py" <<'PY'
import json
import sys

with open(sys.argv[1]) as notebook:
    print("".join(json.load(notebook)["cells"][-1]["outputs"][0]["text"]).strip())
PY
printed() {
    "$T/venv/bin/papermill" --no-progress-bar "$T/in.ipynb" "$T/out.ipynb" "$@" 2>"$T/log"
    "$T/venv/bin/python" "$T/printed.py" "$T/out.ipynb"
}
printf 'lr: 1e-4\nrun: 12e4567\nlimit: 1:30:00\n' >"$T/parameters.yaml"
options=$(printed -p lr 1e-4 -p run 12e4567 -p limit 1:30:00)
file=$(printed -f "$T/parameters.yaml")
echo "by -p: $options; by YAML: $file"
[ "$options" = "[0.0001, inf, '1:30:00']" ]
[ "$file" = "['1e-4', '12e4567', 5400]" ]
