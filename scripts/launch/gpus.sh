#!/usr/bin/env bash
# Train on the GPUs of this machine, all of them unless GPUS says how many. Started again, it goes on where it stopped.
#
#     scripts/launch/gpus.sh configs/sd35/nft_ocr.yaml run_dir=runs/mine
#     ENGINE=fsdp2 scripts/launch/gpus.sh configs/flux/nft_pickscore.yaml   # the network spread over the GPUs
#     GPUS=1 scripts/launch/gpus.sh configs/sd35/nft_ocr.yaml
set -euo pipefail
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
# Micro-batches differ in size: segments that grow leave no gaps between them.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
case ${ENGINE:-ddp} in
ddp) engine=(--mixed_precision no --dynamo_backend no) ;;
fsdp2) engine=(--config_file "$(dirname "$0")/fsdp2.yaml") ;;
*) echo "ENGINE: \"$ENGINE\" is neither ddp nor fsdp2" >&2 && exit 2 ;;
esac
exec python -m diffrl.launch accelerate launch --num_processes "$gpus" --num_machines 1 "${engine[@]}" \
    -m diffrl train "$@" --resume auto
