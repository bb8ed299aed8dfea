#!/usr/bin/env bash
# Train on several machines: run this on each of them. The run's folder is written by machine 0.
#
#     NODES=2 RANK=0 MASTER=10.0.0.1 scripts/launch/nodes.sh configs/sd35/nft_ocr.yaml run_dir=/shared/runs/mine
#     NODES=2 RANK=1 MASTER=10.0.0.1 scripts/launch/nodes.sh configs/sd35/nft_ocr.yaml run_dir=/shared/runs/mine
# ENGINE=fsdp2 spreads the network over all GPUs.
set -euo pipefail
. "$(dirname "$0")/engine.sh"
exec python -m diffrl.launch --nnodes "${NODES:?how many machines}" --node_rank "${RANK:?number of this machine, from 0}" \
    --master_addr "${MASTER:?address of machine 0}" --master_port "${PORT:-29500}" \
    --nproc_per_node "${GPUS:-$(nvidia-smi --list-gpus | wc -l)}" -m diffrl train "$@" --resume auto
