# CPU:   docker build -t diffrl .
# CUDA:  docker build -t diffrl:cuda --build-arg TORCH=cu128 .
# Run:   docker run --rm -v "$PWD/runs:/home/user/runs" diffrl demo          (CUDA: add --gpus all --shm-size 8g)
FROM python:3.11-slim

# The wheels of torch bring their own CUDA libraries, so that both images start from the same small base.
ARG TORCH=cpu
RUN apt-get update && apt-get install --yes --no-install-recommends libgl1 libglib2.0-0 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home user
WORKDIR /build
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/${TORCH} \
    "torch>=2.10" "torchvision>=0.25"
COPY pyproject.toml README.md LICENSE ./
COPY diffrl diffrl
COPY rewards rewards
COPY configs configs
COPY assets assets
# Without the pins of torch, which name the build of another index.
RUN grep -v -i -E '^(torch|torchvision|nvidia|triton|cuda)' constraints.txt > pins.txt \
    && pip install --no-cache-dir --constraint pins.txt ".[serve,tensorboard,wandb]" && rm -rf /build
USER user
WORKDIR /home/user
ENV HF_HOME=/home/user/.cache/huggingface
ENTRYPOINT ["diffrl"]
CMD ["--help"]
