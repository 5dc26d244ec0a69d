#!/bin/bash
# Train on several machines. Run this script on each machine, in a folder that the machines share:
#
#     bash examples/clusters/torchrun.sh HOST --steps 1000
#
# HOST is the name of any one of the machines. It serves the rendezvous. Other arguments go to train_gpt.py.
#
# NODES  number of machines, or a range: with 1:2, training continues on one machine while the other one is absent
# RANKS  number of ranks per machine, one per GPU
# PORT   free port of HOST
# RESTARTS  restarts after failures and departures of machines, 100 by default
set -euo pipefail

host=$1
shift
ranks=${RANKS:-8}

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # for --max-restarts: see docs/reliability.md
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300   # seconds that the ranks have for a checkpoint after SIGTERM

exec torchrun \
    --nnodes "${NODES:-2}" --nproc-per-node "$ranks" --max-restarts "${RESTARTS:-100}" \
    --rdzv-backend c10d --rdzv-endpoint "$host:${PORT:-29500}" --rdzv-id layerzero \
    examples/train_gpt.py --zero3-size "$ranks" --checkpoints runs/torchrun --stop-on SIGTERM "$@"
