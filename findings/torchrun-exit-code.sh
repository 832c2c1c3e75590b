#!/usr/bin/env bash
# torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on Python 3.11.
#
# One would guess: torchrun ends with the exit code of the worker that failed. A training script
# that saves and then ends with 75 (sysexits' "try again") lets the batch script, or SLURM's
# accounting, tell this from a crash.
# What happens: torchrun ends with 1 whatever the worker's code was; the code stands in its log
# alone. What reads $? or sacct's ExitCode sees each end as the same failure.
#     worker 75, torchrun 1
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy

echo "raise SystemExit(75)" >"$T/worker.py"
code=0
"$T/venv/bin/torchrun" --standalone --nproc-per-node 1 "$T/worker.py" 2>"$T/log" || code=$?
echo "worker 75, torchrun $code"
grep -q "exitcode *: 75" "$T/log"
[ "$code" = 1 ]
