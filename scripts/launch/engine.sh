# What accelerate reads where torchrun launches: fsdp2.yaml's settings, if ENGINE=fsdp2. Sourced by nodes.sh and slurm.sbatch.
# Micro-batches differ in size: segments that grow leave no gaps between them.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
case ${ENGINE:-ddp} in
ddp) ;;
fsdp2)
    export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP
    export FSDP_RESHARD_AFTER_FORWARD=true FSDP_CPU_RAM_EFFICIENT_LOADING=false
    ;;
*) echo "ENGINE: \"$ENGINE\" is neither ddp nor fsdp2" >&2 && exit 2 ;;
esac
