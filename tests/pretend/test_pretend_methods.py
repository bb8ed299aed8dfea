"""Every method in every precision on the pretend device: it learns, and its optimiser steps wait as the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pretend_cuda
import pytest
import torch
from pretend_runs import METHODS, config_of

from diffrl.config import load_config
from diffrl.memory.fit import auto_micro_batch
from diffrl.methods.d2align.stage1 import prepare_direction
from diffrl.records import checkpoint
from diffrl.run.train import Run, train

# Waits of the host in an optimiser step: for the norm of the gradient, and MARBLE for its K x K products. D2-Align's
# and SRPO's tiny reward moves its matrix and its texts, whenever it is called: a reward's own business.
NORM = {("read", "run/loop.py:_step"): 1}
TABLE: dict[str, dict[tuple[str, str], int]] = {
    **dict.fromkeys(METHODS, NORM),
    "marble": NORM | {("read", "methods/marble/bank.py:summed"): 1},
    "srpo": NORM | {("copy", "methods/direct/srpo.py:score"): 8 * 2 * 3},  # 8 chunks, each computed twice
    "d2align": NORM | {("copy", f"methods/d2align/corrected.py:{name}"): 2 for name in ("embed_image", "score")},
}
# Of a rollout's batch: are its latents finite, and its scores and features on the host. None inside a sampling step.
BATCH = {"rollout.py:_sample", "rewards/scoring.py:_look_for_writes", "rewards/answers.py:checked"}
BATCH |= {
    "features.py:pixel_features",
    "methods/d2align/corrected.py:embed_image",
    "methods/d2align/corrected.py:score",
}
BATCH |= {"rewards/kinds.py:ask"}  # the same tiny reward, not corrected
BATCH |= {"run/clock.py:now"}  # around a decode: sampling's seconds end there, and the autoencoder's


def started(config: Any) -> Run:
    run = Run(config)
    if config.d2align is not None:
        prepare_direction(config, run.folder.path, run.policy, run.scorer.rewards, run.spec, run.accelerator)
    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_learns_and_waits_no_more_than_the_table_says(config_file: Any, method: str, precision: str) -> None:
    run = started(config_of(config_file, method, f"optimise.precision={precision}"))
    assert run.policy.device.type == "cuda" and all(p.is_cuda for _, p in run.policy.trainable)
    before = run.policy.state()
    lines = [run.loop.run_epoch(epoch) for epoch in range(2)]
    after = run.policy.state()
    assert torch.tensor([line["loss"] for line in lines]).isfinite().all()
    assert all(value.isfinite().all() for value in after.values())
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    with pretend_cuda.waits() as seen:
        rollout, scores, features = run.loop.source(2)
    assert not [key for key in seen if key[2] not in BATCH]
    # Two batches, two rewards: not 3 or 4 sampling steps more. Scouts are decoded, too, three times as many images.
    most = {key: 16 if method == "scouted" and key[2] == "run/clock.py:now" else 4 for key in seen}
    assert all(count <= most[key] for key, count in seen.items()), seen
    scores = scores if scores.ndim == 3 else scores[:, None]
    advantages = run.objective.shaped(run.loop._composed(rollout, scores.cpu(), features.cpu())[0])
    with pretend_cuda.waits() as seen:
        losses, _ = run.loop._optimise(rollout, advantages, 2)
    steps = 2
    found: dict[tuple[str, str], int] = {}
    for (kind, _, place), count in seen.items():
        found[kind, place] = found.get((kind, place), 0) + count
    if precision != "fp16":  # whose scaler asks once more whether the gradient is finite
        assert len(losses) == steps
        assert found == {key: steps * count for key, count in TABLE[method].items()}
    else:
        scale = ("read", "methods/marble/combiner.py:_coefficients")
        assert set(found) <= {*TABLE[method], scale}
        assert found["read", "run/loop.py:_step"] <= 2 * steps
    run.close()


@pytest.mark.parametrize("method", ["gardo", "marble"])
def test_a_resumed_run_ends_where_an_undisturbed_one_does(config_file: Any, method: str) -> None:
    """With deterministic kernels, evaluations, checkpoints and the report; moments and all LoRAs, to the bit."""

    def tensors(name: str, *stops: int) -> dict[str, torch.Tensor]:
        path = Path(str(config_of(config_file, method).run_dir)).with_suffix(".yaml")
        for number, epochs in enumerate([*stops, 2]):
            words = ["rewards.redness=null"] if "rewards" in METHODS[method] else []
            words.append("engine.deterministic=true")
            config = load_config(path, [*words, f"epochs={epochs}", f"run_dir={path.parent / name}"])
            train(config, resume=Path(config.run_dir) if number else None)
            assert torch.are_deterministic_algorithms_enabled()
        saved = checkpoint.latest(path.parent / name)
        assert saved is not None and (path.parent / name / "report.html").is_file()
        return {f"{part}/{key}": value for part, own in checkpoint.load(saved)[0].items() for key, value in own.items()}

    one, two = tensors("one"), tensors("two", 1)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_micro_batches_by_memory_in_every_precision(config_file: Any, precision: str) -> None:
    """fp16 ended in a traceback: its forward was counted without autocast."""
    run = Run(config_of(config_file, "nft", f"optimise.precision={precision}", "optimise.micro_batch=auto"))
    assert run.config.optimise.micro_batch == 64
    assert auto_micro_batch(run.config, run.policy.device, run.accelerator) is run.config
    run.close()


def test_deterministic_kernels_and_tf32_are_as_the_config_says(config_file: Any) -> None:
    for asked in (True, False):
        word = str(asked).lower()
        run = Run(config_of(config_file, "nft", f"engine.deterministic={word}", f"engine.tf32={word}"))
        assert torch.are_deterministic_algorithms_enabled() == torch.backends.cudnn.allow_tf32 == asked
        assert torch.tensor(run.loop.run_epoch(0)["loss"]).isfinite()
        run.close()
    for precision, tf32 in (("bf16", True), ("fp16", True), ("fp32", False)):  # by itself
        Run(config_of(config_file, "nft", f"optimise.precision={precision}")).close()
        assert torch.backends.cudnn.allow_tf32 == tf32
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_reward_may_lie_on_either_device(config_file: Any, device: str) -> None:
    """Images come to where the reward says that it is; scores come back to the host."""
    config = config_of(config_file, "direct")
    run = Run(config)
    reward = run.scorer.rewards["warmth"]
    seen: set[str] = set()

    class Placed:
        name, differentiable = "warmth", True

        def __init__(self) -> None:
            self.device = torch.device(device)

        def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
            seen.add(images.device.type)
            return reward(images, prompts, metadata)

    run.scorer.asked["warmth"].reward = run.objective.rewards["warmth"] = Placed()  # type: ignore[attr-defined]
    assert torch.tensor(run.loop.run_epoch(0)["loss"]).isfinite()
    assert seen == {device}
    run.close()
