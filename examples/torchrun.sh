#!/bin/bash
# Trains on several nodes, and goes on from the last checkpoint when a process is killed. Start it on every node with
# the same HEAD and JOB, in a folder that all nodes share, because every rank writes its part of a checkpoint:
#
#   HEAD=10.0.0.1 NODES=2 LOCAL=10.0.0.1 examples/torchrun.sh --config configs/X.yaml     # on the first node
#   HEAD=10.0.0.1 NODES=2 LOCAL=10.0.0.2 examples/torchrun.sh --config configs/X.yaml     # on the second
#
# HEAD   address of one of the nodes, where they find each other
# LOCAL  address of this node, as the others reach it
# IFNAME network interface of that address (`ip -brief address`), for gloo, and for NCCL where it takes a wrong one
set -euo pipefail

HEAD=${HEAD:-127.0.0.1}
LOCAL=${LOCAL:-127.0.0.1}
NODES=${NODES:-1}
DEVICES=${DEVICES:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)}
if [ "$DEVICES" = 0 ]; then DEVICES=1; fi
if [ -n "${IFNAME:-}" ]; then export GLOO_SOCKET_IFNAME=$IFNAME NCCL_SOCKET_IFNAME=$IFNAME; fi

# The node with the address HEAD holds the rendezvous: torchrun guesses this from the host name, and may guess wrong.
if [ "${HOST:-}" = "" ]; then if [ "$HEAD" = "$LOCAL" ]; then HOST=1; else HOST=0; fi; fi

# A restarted attempt begins a new version_N folder; `--ckpt_path last` finds the newest whole checkpoint of them,
# and begins at step 0 where there is none.
exec torchrun \
    --nnodes "$NODES" --nproc-per-node "$DEVICES" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-moe}" \
    --rdzv-conf "is_host=$HOST" --local-addr "$LOCAL" \
    --no-python lightning-moe fit "$@" \
    --trainer.num_nodes "$NODES" --trainer.devices "$DEVICES" --ckpt_path last
