#!/usr/bin/env bash
# Build the wheel, install it alone in an empty environment, and run the demo's config for one short epoch there.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # as in the Makefile
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" .
rm -rf build/lib build/bdist.* # not what the Makefile has there
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
    "$work"/diffrl-*.whl
cd "$work"
venv/bin/diffrl demo epochs=1 rollout.groups=4 rollout.group_size=4 optimise.batch_size=16 optimise.micro_batch=null \
    evaluate.prompts=4 run_dir="$work/run"
test -s "$work/run/report.html" && test -s "$work/run/lora/pytorch_lora_weights.safetensors"
venv/bin/diffrl rewards list >/dev/null
venv/bin/diffrl bench --list >/dev/null
echo "wheel: the demo runs from an empty environment"
