#!/usr/bin/env bash
# Train on the GPUs of this machine, all of them unless GPUS says how many. Started again, it goes on where it stopped.
#
#     scripts/launch/gpus.sh configs/sd35/nft_ocr.yaml run_dir=runs/mine
#     GPUS=1 scripts/launch/gpus.sh configs/sd35/nft_ocr.yaml optimise.accumulation=480
set -euo pipefail
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
exec accelerate launch --num_processes "$gpus" --num_machines 1 --mixed_precision no --dynamo_backend no \
    -m diffrl train "$@" --resume auto
