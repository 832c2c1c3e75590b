#!/usr/bin/env bash
# torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on Python 3.11.
#
# One would guess: `except Exception` around torch.distributed.checkpoint's load catches a
# checkpoint that is incomplete or does not fit, so that an older one is tried; KeyError, ValueError
# and OSError inside it are Exceptions.
# What happens: they are wrapped in CheckpointException, which derives from BaseException, as
# KeyboardInterrupt does. It passes each `except Exception`, and the job ends where it should have
# gone back to the older checkpoint.
#     a missing file: caught by `except Exception` False, by `except BaseException` True
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy

cat >"$T/probe.py" <<'PY'
import pathlib
import sys

import torch
import torch.distributed.checkpoint as dcp

folder = pathlib.Path(sys.argv[1])
dcp.save({"weight": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
for data in folder.glob("*.distcp"):
    data.unlink()  # as when a node was lost while it wrote
by_exception = False
by_base = False
try:
    try:
        dcp.load({"weight": torch.zeros(4)}, checkpoint_id=folder, no_dist=True)
    except Exception:
        by_exception = True
except BaseException as error:
    by_base = True
    print(type(error).__mro__)
print(f"caught by `except Exception` {by_exception}, by `except BaseException` {by_base}")
assert (by_exception, by_base) == (False, True)
PY
"$T/venv/bin/python" -W ignore "$T/probe.py" "$T/checkpoint"
