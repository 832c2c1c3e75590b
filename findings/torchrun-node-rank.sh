#!/usr/bin/env bash
# torch 2.13.0, Linux x86_64, Python 3.10 or newer, no GPU; seen 2026-11-28 on Python 3.11.
#
# One would guess: `torchrun --node-rank $SLURM_NODEID` decides which node has which ranks. If it is
# ignored with the c10d rendezvous, then nodes are numbered as they came, or by their names as SLURM
# sorts them: node2 before node10.
# What happens: with --rdzv-backend=c10d the option is ignored without a word, and nodes are
# numbered by their addresses, sorted as text: node10 (here 127.0.0.10) comes before node2
# (127.0.0.2). Pipeline neighbours, files named by rank and hand-made rank maps are then on other
# nodes than planned, and move when one node is replaced.
#     127.0.0.2 asked for node rank 0, got 1
#     127.0.0.10 asked for node rank 1, got 0
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy

# shellcheck disable=SC2016  # each worker expands this
echo 'echo "$ASKED got $GROUP_RANK"' >"$T/worker.sh"
port=$("$T/venv/bin/python" -c '
import socket
free = socket.socket()
free.bind(("127.0.0.1", 0))
print(free.getsockname()[1])')
node() {
    ASKED="$1 asked for node rank $2," "$T/venv/bin/torchrun" --nnodes 2 --nproc-per-node 1 \
        --node-rank "$2" --local-addr "$1" --rdzv-id finding \
        --rdzv-backend c10d --rdzv-endpoint "127.0.0.1:$port" \
        --no-python bash "$T/worker.sh" 2>"$T/log$2"
}
node 127.0.0.2 0 >"$T/out0" &
node 127.0.0.10 1 >"$T/out1"
wait
cat "$T/out0" "$T/out1"
grep -q "rank 0, got 1" "$T/out0"
grep -q "rank 1, got 0" "$T/out1"
