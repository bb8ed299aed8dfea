"""`text_length`: a prompt's embedding is as long as asked, the one of the pipeline's own call at this length."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
import yaml
from covering import some
from test_families_2026 import OLDER
from tiny_models.recent import make

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.drawing import Drawing
from diffrl.errors import UserError
from diffrl.memory import fit, texts
from diffrl.memory.meta_modules import meta_backbone
from diffrl.policy import load_policy

UNGUIDED = {"do_classifier_free_guidance": False}
MORE = {
    "sd3": {"prompt_2": None, "prompt_3": None, **UNGUIDED},
    "flux": {"prompt_2": None},
    "lumina2": UNGUIDED,
    "z-image": UNGUIDED,
}
PROMPT = "a red circle left of " + "a blue square, " * 30


def model(name: str, folder: Path) -> str:
    return str(OLDER[name](folder) if name in OLDER else make(name, folder))


@pytest.mark.parametrize("name", ["sd3", "flux", "lumina2", "z-image", "qwen-image"])
def test_the_embedding_is_the_pipelines_own_at_this_length(tmp_path: Path, name: str) -> None:
    folder = model(name, tmp_path / name)
    policy = load_policy(folder, text_length=40)
    assert policy.backbone.plain_call["max_sequence_length"] == 40
    embeds = policy.encode([PROMPT]).embeds
    assert embeds.shape[1] == (16 + 40 if name == "sd3" else 40)  # SD3 reads CLIP's beside T5's
    pipe, more = diffusers.DiffusionPipeline.from_pretrained(folder), MORE.get(name, {})
    with torch.no_grad():
        plain = pipe.encode_prompt(PROMPT, max_sequence_length=40, **more)[0]
    plain = plain[0][None] if isinstance(plain, list) else plain  # Z-Image's are a list of texts
    assert torch.equal(embeds, plain)


def test_the_default_is_the_pipelines_own_call(tmp_path: Path) -> None:
    assert load_policy(model("qwen-image", tmp_path)).backbone.plain_call["max_sequence_length"] == 512


@pytest.mark.parametrize(
    ("name", "length", "line"), [("sd", 77, "fixed"), ("qwen-image-2.1", 64, "fixed"), ("flux", 513, "at most 512")]
)
def test_a_length_that_the_pipeline_cannot_read_is_refused(tmp_path: Path, name: str, length: int, line: str) -> None:
    with pytest.raises(UserError, match=f"^text_length: .*{line}"):
        load_policy(model(name, tmp_path), text_length=length)


def test_doctor_counts_this_length(config_file, tmp_path: Path) -> None:
    folder = model("sd3", tmp_path / "sd3")
    shapes, found = [], []
    for length in (8, 512):
        file = config_file("run", model=folder, rollout={"resolution": 16}, objective="rwr", text_length=length)
        config = load_config(file)
        shapes.append(meta_backbone(config).text_shape[0])
        found.append(fit.estimate(config))
    assert shapes == [16 + 8, 16 + 512]
    short, long = found
    key = next(name for name in short.peaks if name.startswith("training"))
    assert long.peaks[key.replace(str(short.rows), str(long.rows))] > short.peaks[key]


def test_what_a_lora_was_trained_with_is_what_commands_draw_with(config_file, tmp_path: Path) -> None:
    folder = model("sd3", tmp_path / "sd3")
    run = tmp_path / "run"
    (run / "lora").mkdir(parents=True)
    config = load_config(config_file("run", model=folder, text_length=12))
    (run / "config.yaml").write_text(yaml.safe_dump(config.resolved()), encoding="utf-8")
    assert Drawing(folder, lora=str(run / "lora")).text_length == 12
    assert Drawing(folder).text_length is None


def prompts_of(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Files of training and held-out prompts; the longest of all is neither the first nor the longest line."""
    lines = {"train": ["a red circle", "a blue hat. " * 2, "one", "two"], "test": ["a" * 19, "5.1, 'on'. " * 3]}
    for split, of in lines.items():
        (folder / f"{split}.txt").write_text("\n".join(of))
    return {split: str(folder / f"{split}.txt") for split in lines}, [
        line.strip() for of in lines.values() for line in of
    ]


OWN = ["z-image", "qwen-image", "qwen-image-2.1", "lumina2", "sana", "krea2"]


@pytest.mark.parametrize("name", some(OWN, "z-image", "qwen-image-2.1", "sana"))
def test_doctor_counts_the_longest_prompt_where_texts_keep_their_lengths(
    config_file, tmp_path: Path, name: str
) -> None:
    folder, (prompts, lines) = model(name, tmp_path / name), prompts_of(tmp_path)
    file = config_file("run", model=folder, prompts=prompts, rollout={"resolution": 32}, objective="rwr")
    hollow, backbone = meta_backbone(load_config(file)), load_policy(folder).backbone
    lengths = [backbone.encode(text, torch.device("cpu")).embeds.shape[1] for text in lines]
    assert hollow.prompts_length == hollow.max_length == max(lengths) > lengths[0]
    assert hollow.blank(2, torch.float32).embeds.shape[1] == max(lengths)


@pytest.mark.long
def test_doctor_says_whether_its_texts_are_the_prompts_own(config_file, tmp_path: Path, capsys) -> None:
    folder, (prompts, _) = model("z-image", tmp_path / "z"), prompts_of(tmp_path)
    file = config_file("run", model=folder, prompts=prompts, rollout={"resolution": 32}, objective="rwr")
    assert main(["doctor", str(file), "--gpu", "80"]) == 0 and "as the longest has" in capsys.readouterr().out
    (tmp_path / "z" / "tokenizer").rename(tmp_path / "elsewhere")
    texts._longest.cache_clear()
    assert main(["doctor", str(file), "--gpu", "80"]) == 0
    assert f"{64:9d} tokens of each prompt, the most" in capsys.readouterr().out
