#!/bin/bash
# sbatch examples/slurm.sh --config configs/X.yaml
#
# 90 seconds before the time limit SLURM sends SIGUSR1 to every rank: they save hpc_ckpt_N.ckpt, and the job is put back
# into the queue. Leave more time where a save takes longer. Preemption sends SIGTERM: ModelCheckpoint saves then, too,
# if it has save_on_exception: true. Either way the job goes on from the newest checkpoint when it is started again.
#SBATCH --job-name=moe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=moe-%j.log
set -euo pipefail

# The network interface between the nodes, where there are several (`ip -brief address` lists them). Gloo carries what
# ranks tell each other through the CPU, also beside NCCL.
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# One task a GPU, started by srun: not torchrun, which would not pass SIGUSR1 on.
exec srun --kill-on-bad-exit=1 lightning-moe fit "$@" \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" --ckpt_path last
