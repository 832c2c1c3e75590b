#!/usr/bin/env bash
# torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on Python 3.11.
#
# One would guess: SLURM's `--signal=USR1@120` under torchrun does what it does to a plain process:
# workers that have a handler save and end, and torchrun, which passes SIGTERM on, passes USR1 on or
# ignores it.
# What happens: torchrun handles TERM, INT, HUP and QUIT alone, so USR1 ends torchrun itself at once
# (138 = 128 + 10). Its workers are not told: a worker that got no signal runs on, now without a
# parent that watches it.
#     torchrun 138, worker alive
# (`trap '' USR1` in the shell before torchrun keeps it; TORCHELASTIC_SIGNALS_TO_HANDLE names
# signals that end all.)
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy

cat >"$T/worker.py" <<'PY'
import os
import pathlib
import time

path = pathlib.Path(__file__)
path.with_name("started").write_text(str(os.getpid()))
path.with_name("started").rename(path.with_name("pid"))
time.sleep(60)
PY
"$T/venv/bin/torchrun" --standalone --nproc-per-node 1 "$T/worker.py" 2>"$T/log" &
torchrun=$!
while [ ! -e "$T/pid" ]; do
    kill -0 "$torchrun"
    sleep 0.2
done
kill -USR1 "$torchrun"
code=0
wait "$torchrun" || code=$?
sleep 5  # time enough for a worker to be ended
worker=ended
if kill "$(cat "$T/pid")" 2>/dev/null; then
    worker=alive
fi
echo "torchrun $code, worker $worker"
[ "$code $worker" = "138 alive" ]
