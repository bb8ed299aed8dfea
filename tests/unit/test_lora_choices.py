"""What a LoRA may be: targets by preset and pattern, rank and alpha by layer, rsLoRA, DoRA, peft's starts.

The right value is peft's own network with the same config, and diffusers' own loading of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from diffusers import DiffusionPipeline
from test_families_2026 import MAIN, OLDER
from tiny import PROMPTS, scramble
from tiny_models.recent import TINY, make

from diffrl.config import Config
from diffrl.config.loras import spec_of
from diffrl.errors import UserError
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.run.train import Run, train

CHOICES: dict[str, dict[str, Any]] = {
    "uneven": {
        "rank": {"default": 4, "to_k": 2, "ff": 6},
        "alpha": {"default": 8, "ff": 3},
        "targets": "attention+mlp",
    },
    "rslora": {"rank": 4, "alpha": 4, "kind": "rslora+kaiming", "targets": ["attention", "proj_out"]},
    "dora": {"rank": 4, "kind": "dora", "targets": ["transformer_blocks.0.*.net.*", "attn.to_q"]},
    "orthogonal": {"rank": {"default": 4, "to_v": 2}, "kind": "rslora+orthogonal"},
}


def spec(choice: str) -> LoraSpec:
    made: LoraSpec = spec_of(Config(lora=CHOICES[choice]).lora)
    return made


def velocity(policy: Policy, grad: bool = False) -> torch.Tensor:
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad):
        return policy.predict(x, torch.tensor([0.9, 0.4]), policy.encode(PROMPTS)).v


@pytest.mark.parametrize("precision", some(["fp32", "bf16"], "fp32"))
@pytest.mark.parametrize("choice", CHOICES)
def test_values_and_gradients_are_peft_s(tiny_model: Path, tmp_path: Path, choice: str, precision: str) -> None:
    if choice == "orthogonal" and precision != "fp32":
        pytest.skip("refused: it would not begin without effect")
    policy = load_policy(str(tiny_model), lora=spec(choice), precision=precision)
    before = velocity(load_policy(str(tiny_model), precision=precision))
    near = 1e-5 if precision == "fp32" else 0.05  # of the largest value
    assert (velocity(policy) - before).abs().max() <= near, "it begins without effect"
    scramble(policy, std=0.1)
    mine = velocity(policy, grad=True)
    mine.square().mean().backward()
    found = {name: parameter.grad for name, parameter in policy.trainable}
    for _, parameter in policy.trainable:
        parameter.grad = None
    for group in policy.lora.fused.groups:  # peft's own forwards
        for layer, forward in zip(group.layers, group.peft, strict=True):
            layer.forward = forward
    theirs = velocity(policy, grad=True)
    theirs.square().mean().backward()
    assert (theirs - before).abs().max() > 0.1
    near *= float(theirs.abs().max().clamp(min=1))
    assert (mine - theirs).abs().max() < near
    for name, parameter in policy.trainable:
        other = parameter.grad
        assert other is not None and (found[name] - other).norm() <= 10 * near * other.norm() + 1e-9, name
    if precision == "fp32":  # and the file in diffusers, and in the reader
        policy.save_lora(tmp_path)
        mine = mine.detach()
        assert (velocity(load_policy(str(tiny_model), start=tmp_path)) - mine).abs().max() < near
        pipe = DiffusionPipeline.from_pretrained(tiny_model, text_encoder_3=None, tokenizer_3=None)
        pipe.load_lora_weights(tmp_path)
        plain = load_policy(str(tiny_model))
        plain.backbone.network = plain.network = pipe.transformer
        plain.lora._active[:] = []
        assert (velocity(plain) - mine).abs().max() < near
        again = load_policy(str(tiny_model), start=tmp_path, lora=spec(choice))
        assert (velocity(again) - mine).abs().max() < near, "also where it begins as its own file"


def test_a_rank_by_layer_and_its_alpha(tiny_model: Path) -> None:
    policy = load_policy(str(tiny_model), lora=spec("uneven"))
    layers = {name.split(".", 2)[-1]: layer for name, layer in policy.lora.layers.items()}
    seen = {name: (layer.r["default"], layer.scaling["default"]) for name, layer in layers.items()}
    assert seen["attn.to_k"] == (2, 4.0) and seen["attn.to_q"] == (4, 2.0)
    assert seen["ff.net.2"] == (6, 0.5), "a word is a whole part of the name"
    assert spec("rslora").scale == 2.0
    with pytest.raises(UserError, match=r"lora.rank: no layer with a LoRA has \"fff\" in its name"):
        load_policy(str(tiny_model), lora=LoraSpec(ranks={"fff": 2}))


@pytest.mark.parametrize(
    ("base", "kind"),
    some(
        [(base, kind) for base in ("full", "int8") for kind in ("dora", "rslora+kaiming")],
        *(("full", "rslora+kaiming"), ("int8", "dora")),
    ),
)
def test_a_run_of_each_kind(config_file: Any, kind: str, base: str) -> None:
    from diffrl.config import load_config
    from diffrl.memory.fit import estimate

    lora = {"kind": kind, "targets": "attention+mlp", "rank": {"default": 4, "ff": 2}}
    config = load_config(config_file("run", lora=lora, engine={"base": base}, epochs=1, nft={"beta": 0.5}))
    train(config)
    run = Run(config.model_copy(update={"run_dir": config.run_dir + "-2"}))
    parts = estimate(config).parts
    counted = next(size // int(name.split()[1]) for name, size in parts.items() if name.startswith("LoRA, "))
    assert counted == sum(parameter.nbytes for _, parameter in run.policy.trainable)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"kind": "pissa"}, "changes the frozen weights"),
        ({"kind": "lorra"}, 'nearest: "lora"'),
        ({"kind": "dora+kaiming+gaussian"}, "a word is too many"),
        ({"rank": {"ff": 3}}, "default: NUMBER"),
        ({"rank": {"default": 3, "ff": 0}}, "at least 1"),
        ({"merge": [{"fil": "x"}]}, "got fil"),
        ({"merge": ["x=1000"]}, "from -100 to 100"),
    ],
)
def test_bad_choices_are_one_line(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Config(lora=lora)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.long) for name in (*OLDER, *MAIN)])
def test_attention_and_mlp_of_every_family(tmp_path: Path, family: str) -> None:
    """Every matrix has a gradient; a family whose feed-forward is no linear layer says so."""
    OLDER[family](tmp_path / "m") if family in OLDER else make(family, tmp_path / "m")
    size: Callable[[str], Any] = lambda name: TINY[name].resolution if name in TINY else None  # noqa: E731
    wanted = LoraSpec(2, 2, ["attention", "mlp"])
    try:
        policy = load_policy(str(tmp_path / "m"), lora=wanted, resolution=size(family))
    except UserError as error:
        assert family == "sana" and '"mlp"' in str(error)
        return
    plain = load_policy(str(tmp_path / "m"), lora=LoraSpec(2, 2), resolution=size(family))
    assert len(policy.lora.layers) > len(plain.lora.layers)
    scramble(policy)
    velocity(policy, grad=True).square().mean().backward()
    assert not [name for name, parameter in policy.trainable if parameter.grad is None or not parameter.grad.any()]
