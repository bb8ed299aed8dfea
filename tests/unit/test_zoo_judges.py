"""Judges of 2026 by their true classes and names, tiny and random: HPSv3, HPSv3++, VQAScore, DeQA-Score.

Against the originals' own code they are in `tests/upstream`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diffrl.errors import UserError
from diffrl.reward_tools.check import examine, example_images
from diffrl.rewards import load_reward

pytestmark = pytest.mark.usefixtures("one_call")

CPU = {"device": "cpu", "precision": "fp32"}
INSTRUCTION = "Rate the picture of {text_prompt}: <|Reward|>\nEND"
QWEN = ["<|end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|>"
    "<|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def words(special: list[str], **more: Any) -> Any:
    """A tokenizer of bytes, with the special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    base = Tokenizer(models.BPE(vocab=ids, merges=[]))
    base.pre_tokenizer, base.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token=special[0], eos_token=special[0], additional_special_tokens=special, **more
    )


def random_(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.15 * torch.randn_like(parameter) + (parameter.ndim == 1)
    return module.eval()


def conforms(reward: Any) -> None:
    images, prompts = example_images()
    bad = [result for result in examine(reward, images[::24], prompts[::24]) if not result.passed]
    assert not bad, bad


def hpsv3(folder: Path, newer: bool) -> dict[str, Any]:
    """The files of a tiny HPSv3 (the names are those of transformers 4.45) or HPSv3++, and the reward's arguments."""
    from transformers import (
        Qwen2VLConfig,
        Qwen2VLImageProcessor,
        Qwen2VLModel,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLConfig,
        Qwen3VLModel,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    names = {"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 2, "vision_end_token_id": 3}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**SIZES, "vocab_size": 300, "num_key_value_heads": 2, "rope_parameters": rope, "pad_token_id": 0}
    text |= {"bos_token_id": None, "eos_token_id": 0}
    limits = {"shortest_edge": 28 * 28, "longest_edge": 10**7}
    vision: dict[str, Any] = {"depth": 1, "num_heads": 2}
    if newer:
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16}
        vision |= {"deepstack_visual_indexes": [0]}
        config: Any = Qwen3VLConfig(text_config={**text, "head_dim": 16}, vision_config=vision, **names)
        network: Any = Qwen3VLModel(config)
        parts: Any = (Qwen2VLImageProcessor(patch_size=16, size=limits), words(QWEN), Qwen3VLVideoProcessor())
        processor: Any = Qwen3VLProcessor(*parts, chat_template=TEMPLATE)
    else:
        vision |= {"embed_dim": 32, "hidden_size": 32}
        config, parts = Qwen2VLConfig(text_config=text, vision_config=vision, **names), None
        network = Qwen2VLModel(config)
        parts = (Qwen2VLImageProcessor(size=limits), words(QWEN), Qwen2VLVideoProcessor())
        processor = Qwen2VLProcessor(*parts, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    config.save_pretrained(folder)
    network.resize_token_embeddings(len(QWEN) + 256 + 1)  # as their code does, after it added <|Reward|>
    head = [nn.Linear(32, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 2)]
    whole = nn.ModuleDict({"model": network, "rm_head": nn.Sequential(*head)})
    if newer:
        guess = {"proj": nn.Linear(32, 16), "pool_attn": nn.Linear(16, 1), "out_proj": nn.Linear(16, 1)}
        whole["cap_encoder"] = nn.ModuleDict(guess)
        whole["cond_encoder"] = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Linear(16, 16))
        whole["film_gen"] = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64))
    tensors = dict(random_(whole).state_dict())
    if not newer:
        tensors = {k.replace("model.visual.", "visual."): v for k, v in tensors.items()}
        tensors = {k.replace("model.language_model.", "model."): v for k, v in tensors.items()}
    torch.save({"model": {**tensors, "lm_head.weight": torch.zeros(2, 32)}}, folder / "judge.pth")
    (folder / "instruction.txt").write_text(INSTRUCTION)
    return {
        "weights": str(folder / "judge.pth"),
        "backbone": str(folder),
        "instruction": str(folder / "instruction.txt"),
        **CPU,
    }


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return hpsv3(tmp_path_factory.mktemp("hpsv3"), newer=False)


def test_hpsv3_reads_the_mean_of_its_head_at_the_mark(judge: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffrl_zoo.hpsv3.PIXELS", 4 * 28 * 28)
    reward = load_reward("hpsv3", **judge)
    conforms(reward)
    image = example_images()[0][:1]
    states: dict[str, torch.Tensor] = {}
    keep = reward.network.register_forward_hook(lambda module, inputs, output: states.update(h=output[0]))
    score = reward(image, ["a dog <|Reward|> here"], [{}])
    keep.remove()
    chat = f"<|im_start|><|vision_start|>{'<|image_pad|>' * 4}<|vision_end|>"
    chat += INSTRUCTION.replace("{text_prompt}", "a dog <|Reward|> here")
    place = len(reward.tokenizer(chat.rpartition("<|Reward|>")[0]).input_ids)  # the last one: the prompt has one, too
    assert score.item() == pytest.approx(reward.head(states["h"][0, place])[0].item(), abs=1e-6)


def test_hpsv3pp_is_told_by_its_names_and_conditioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffrl_zoo.hpsv3.PIXELS", 4 * 28 * 28)
    files = hpsv3(tmp_path, newer=True)
    images, prompts = (part[:2] for part in example_images())
    reward = load_reward("hpsv3", **files)
    first, last = (load_reward("hpsv3", **files, iteration=step)(images, prompts, [{}] * 2) for step in (0.0, 1.0))
    assert torch.equal(reward(images, prompts, [{}] * 2), first) and not torch.allclose(first, last)
    tensors = torch.load(files["weights"])["model"]
    state = torch.randn(3, 32, dtype=torch.float64)
    linear = {k: v.double() for k, v in tensors.items()}

    def layer(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ linear[f"{name}.weight"].T + linear[f"{name}.bias"]

    capability = layer(layer(state, "cap_encoder.proj"), "cap_encoder.out_proj").sigmoid()
    condition = torch.cat([capability, torch.full_like(capability, 0.25)], dim=1)
    hidden = layer(nn.functional.gelu(layer(condition, "cond_encoder.0")), "cond_encoder.2")
    gamma, beta = layer(layer(hidden, "film_gen.0").relu(), "film_gen.2").chunk(2, dim=1)
    torch.testing.assert_close(reward.film.double()(state, 0.25), state * (1 + gamma) + beta)


def test_hpsv3s_mistakes_are_one_clear_line(judge: dict[str, Any], tmp_path: Path) -> None:
    torch.save({"model.norm.weight": torch.zeros(2)}, tmp_path / "other.pth")
    tensors = torch.load(judge["weights"])["model"]
    torch.save({k: v for k, v in tensors.items() if "layers.1" not in k}, tmp_path / "half.pth")
    (tmp_path / "plain.txt").write_text("Rate this: {text_prompt}")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"weights": "nowhere.pth"}, 'no file of weights "nowhere.pth"'),
        ({"weights": str(tmp_path / "other.pth")}, "has no tensors rm_head"),
        ({"weights": str(tmp_path / "half.pth")}, "does not fit its class"),
        ({"instruction": str(tmp_path / "plain.txt")}, "has not one {text_prompt} and one <|Reward|>"),
        ({"instruction": None}, "pip install --no-deps hpsv3"),
        ({"iteration": 2.0}, "from 0 to 1"),
        ({"precision": "fp8"}, 'unknown precision "fp8"'),
    ]
    for params, message in wrong:
        with pytest.raises(UserError) as error:
            load_reward("hpsv3", **{**judge, **params})
        assert message in str(error.value) and "\n" not in str(error.value)


def test_vqascore_is_the_mean_log_probability_of_yes(tmp_path: Path) -> None:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, T5Config

    from diffrl_zoo.clip_t5 import ClipT5

    vision = CLIPVisionConfig(**SIZES, image_size=28, patch_size=14)
    tower = tmp_path / "tower"
    vision.save_pretrained(tower)
    CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(tower)
    config = T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, tie_word_embeddings=False,
        decoder_start_token_id=0, mm_vision_tower=str(tower), mm_projector_type="mlp2x_gelu",
        mm_vision_select_layer=-2, vision=vision.to_dict(),
    )  # fmt: skip
    model: Any = random_(ClipT5(config))
    model.save_pretrained(tmp_path)
    words(["<pad>", "</s>", "<unk>"]).save_pretrained(tmp_path)
    reward = load_reward("vqascore", model=str(tmp_path), **CPU)
    conforms(reward)
    images, prompts = (part[:2] for part in example_images())
    scores = reward(images, prompts, [{}] * 2)
    assert isinstance(reward.network.vision_tower.vision_tower, CLIPVisionModel)
    embed = model.get_input_embeddings()
    for image, prompt, score in zip(images, prompts, scores, strict=True):
        asked = f'\nDoes this figure show "{prompt}"? Please answer yes or no. ASSISTANT: '
        parts = [
            embed(reward.before)[None],
            model.see(reward.preprocess(image[None])),
            embed(reward._tokens(asked))[None],
        ]
        loss = model(inputs_embeds=torch.cat(parts, dim=1), labels=reward.wanted[None]).loss
        assert score.item() == pytest.approx(loss.neg().exp().item(), abs=1e-6)
    with pytest.raises(UserError, match="not a CLIP-FlanT5"):
        load_reward("vqascore", model=str(tower), **CPU)


def test_deqa_is_the_expected_level_of_the_next_word(tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import CLIPImageProcessor, LlamaConfig

    from diffrl_zoo.mplug_owl2 import MplugOwl2

    visual = {
        "visual_model": {**SIZES, "image_size": 28, "patch_size": 14, "layer_norm_eps": 1e-6},
        "visual_abstractor": {**SIZES, "num_learnable_queries": 3, "encoder_hidden_size": 32, "grid_size": 2,
                              "layer_norm_eps": 1e-6},
    }  # fmt: skip
    model: Any = random_(MplugOwl2(LlamaConfig(**SIZES, vocab_size=300, visual_config=visual)))
    model.save_pretrained(tmp_path)
    tokenizer = words(["<unk>", "<s>", "</s>"], bos_token="<s>")
    mark = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer._tokenizer.post_processor = mark
    tokenizer.save_pretrained(tmp_path)
    CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(tmp_path)
    reward = load_reward("deqa", model=str(tmp_path), **CPU)
    conforms(reward)
    image = example_images()[0][:1]
    logits = model.next_word(reward.before, reward.preprocess(image), reward.after)[0]
    levels = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0])
    expected = (logits[[tokenizer.encode(letter)[1] for letter in "egfpb"]].softmax(dim=0) * levels).sum()
    assert reward(image, [""], [{}]).item() == pytest.approx(expected.item(), abs=1e-5)
    layer = model.model.layers[0]
    layer.self_attn.v_proj.multiway[1].weight.data.zero_()  # the image's own values are read, and only by its tokens
    assert not torch.equal(model.next_word(reward.before, reward.preprocess(image), reward.after)[0], logits)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="not an mPLUG-Owl2"):
        load_reward("deqa", model=str(tmp_path), **CPU)
