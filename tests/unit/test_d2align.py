"""D2-Align's parts: embedding rewards, the direction's file, the corrected reward, what a config may ask, its page."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tiny import clip_tokenizer
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from diffrl.cli.main import main
from diffrl.config import check_plugin, load_config
from diffrl.errors import UserError
from diffrl.methods.d2align.corrected import Corrected, Direction, Identity, guided_embedding, load_direction
from diffrl.methods.d2align.evidence import evidence
from diffrl.methods.d2align.stage1 import pool_prompts
from diffrl.prompts import Prompt
from diffrl.records.tracking import save_image
from diffrl.report.d2align import write_page
from diffrl.reward_kinds.fingerprint import fingerprint
from diffrl.reward_tools.check import examine
from diffrl.rewards import load_reward
from diffrl.rewards.protocol import Card
from diffrl.rewards.registry import split_name

DATA = Path(__file__).parents[1] / "data"
PLUGIN, REDNESS = f"{DATA}/embedder.py:Embedder", f"{DATA}/redness.py:Redness"
sys.path.insert(0, str(DATA))
from embedder import WIDTH, Embedder  # noqa: E402

TEXTS = ["red a", "blue b", "red and e", "two red f"]
IMAGES = torch.rand(4, 3, 24, 24, generator=torch.Generator().manual_seed(0))
IDENTITY = Identity(PLUGIN, {}, "0" * 64, 0, 2.0)


def a_direction(seed: int = 0) -> Direction:
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3)) / 4
    return Direction(vector, fingerprint(Embedder(seed=seed)), IDENTITY)  # type: ignore[arg-type]


def smooth_pictures(height: int, width: int, count: int = 2) -> tuple[torch.Tensor, list[Image.Image]]:
    """Pictures of bytes as a tensor (B, 3, H, W) in [0, 1] and as PIL images."""
    raw = torch.randint(256, (count, 3, height, width), generator=torch.Generator().manual_seed(1))
    images = torch.nn.functional.avg_pool2d(raw.float(), 5, 1, 2).round()
    return images / 255, [Image.fromarray(x.byte().permute(1, 2, 0).numpy()) for x in images]


# preprocessing


def by_hpsv2(picture: Image.Image, side: int) -> torch.Tensor:
    """HPS's own: the longer side to `side`, then black bars."""
    scale = side / max(picture.size)
    height, width = (round(x * scale) for x in picture.size[::-1])
    resized = TF.resize(picture, [height, width], InterpolationMode.BICUBIC)
    right, down = side - width, side - height
    return TF.to_tensor(TF.pad(resized, [right // 2, down // 2, right - right // 2, down - down // 2], fill=0))


def by_torchvision(picture: Image.Image, side: int) -> torch.Tensor:
    return TF.to_tensor(TF.center_crop(TF.resize(picture, side, InterpolationMode.BICUBIC), [side, side]))


def in_float(picture: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Pillow's own bicubic filter on numbers instead of bytes, which it would round twice."""
    from torchvision.transforms.functional import pil_to_tensor

    channels = [
        Image.fromarray(channel.numpy(), mode="F").resize(size[::-1], Image.Resampling.BICUBIC) for channel in picture
    ]
    return torch.cat([pil_to_tensor(channel) for channel in channels]).clamp(0, 1)


@pytest.mark.parametrize("shape", [(64, 64), (48, 71), (20, 31), (90, 33)])
def test_preprocessing_is_pillows_but_for_the_rounding_to_bytes(shape: tuple[int, int]) -> None:
    from diffrl_zoo.clip import fit

    tensors, pictures = smooth_pictures(*shape)
    for mode, own in (("shortest", by_torchvision), ("longest", by_hpsv2)):
        ours, theirs = fit(tensors, (32, 32), mode), torch.stack([own(picture, 32) for picture in pictures])
        assert ours.shape == theirs.shape
        # Pillow rounds to bytes after each of two passes; what is left is that rounding, which has no bias.
        assert (ours - theirs).abs().max() < 1.1 / 255 and (ours - theirs).mean().abs() < 2e-4
    exact = torch.stack([in_float(picture, (24, 40)) for picture in tensors])
    assert (fit(tensors, (24, 40), "squash") - exact).abs().max() < 1e-3


def test_sizes_are_those_of_the_original_code_to_the_pixel() -> None:
    from open_clip.transform import ResizeKeepRatio
    from torchvision.transforms.functional import _compute_resized_output_size

    from diffrl_zoo.clip import resized

    for side in (224, 378):
        for h in range(64, 720, 7):
            for w in range(h, 1100, 5):
                for shape in ((h, w), (w, h)):
                    assert list(resized(shape, (side, side), "shortest")) == _compute_resized_output_size(shape, [side])
                picture = SimpleNamespace(size=(w, h))
                for mode, longest in (("longest", 1.0), ("shortest", 0.0)):
                    size = (side, side) if mode == "longest" else (side, side + 32)
                    assert list(resized((h, w), size, mode)) == ResizeKeepRatio.get_params(picture, size, longest)


def test_hps_resizes_floats_and_clamps_nothing() -> None:
    """Its own transform of a picture: to a tensor first, then torchvision's resize, black bars."""
    from diffrl_zoo.clip import fit

    board = ((torch.arange(50)[:, None] // 5 + torch.arange(71) // 5) % 2).float().expand(1, 3, -1, -1)
    height, width = round(50 * 32 / 71), 32
    down = 32 - height
    own = TF.resize(board, [height, width], InterpolationMode.BICUBIC)
    own = TF.pad(own, [0, down // 2, 0, down - down // 2])
    assert torch.equal(fit(board, (32, 32), "hps"), own) and own.max() > 1.001
    assert fit(board, (32, 32), "longest").max() == 1.0


# PickScore and HPS-v2.1 on tiny models of their true architectures


@pytest.fixture(scope="module")
def pickscore(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    folder = tmp_path_factory.mktemp("pickscore")
    tokenizer = clip_tokenizer(folder)
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": len(tokenizer), "max_position_embeddings": 16}
    text |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    torch.manual_seed(0)
    vision = {**tower, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH))
    model.logit_scale.data.fill_(3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_pickscore_is_transformers_own_score(pickscore: Path) -> None:
    from transformers import AutoProcessor, CLIPModel

    reward: Any = load_reward("pickscore", model=str(pickscore), device="cpu")
    model, processor = CLIPModel.from_pretrained(pickscore).eval(), AutoProcessor.from_pretrained(pickscore)
    texts = ["a red hat", "two cats and a very long text that does not fit into sixteen tokens"]
    for shape in ((64, 64), (48, 71), (20, 31)):
        tensors, pictures = smooth_pictures(*shape)
        with torch.no_grad():
            inputs = processor(
                text=texts, images=pictures, return_tensors="pt", padding=True, truncation=True, max_length=16
            )
            expected = model(**inputs).logits_per_image.diagonal()
            scores = reward(tensors, texts, [{}] * 2)
            assert (reward.clip.preprocess(tensors) - inputs["pixel_values"]).abs().max() < 1.1 / 255 / min(
                reward.clip.std
            )
        torch.testing.assert_close(scores / reward.factor, expected / reward.factor, atol=2e-3, rtol=0)
    assert reward.factor == pytest.approx(2.718281828**3, rel=1e-5)
    cosine = load_reward("pickscore", model=str(pickscore), device="cpu", scale=False)(tensors, texts, [{}] * 2)
    torch.testing.assert_close(cosine * reward.factor, scores)


@pytest.fixture(scope="module")
def hpsv2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of weights as HPS publishes it, of a tiny architecture that open_clip is told of; returns its path."""
    import open_clip

    folder = tmp_path_factory.mktemp("hps")
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 1, "layers": 1}
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 32, "patch_size": 8}
    (folder / "tiny-hps.json").write_text(json.dumps({"embed_dim": WIDTH, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(folder / "tiny-hps.json")
    torch.manual_seed(0)
    model = open_clip.create_model("tiny-hps")
    torch.save({"epoch": 1, "state_dict": model.state_dict()}, folder / "HPS_v2.1_compressed.pt")
    return str(folder / "HPS_v2.1_compressed.pt")


def test_hpsv2_is_the_cosine_of_its_weights_on_padded_pictures(hpsv2: str) -> None:
    import open_clip

    reward: Any = load_reward("hpsv2", weights=hpsv2, model="tiny-hps", device="cpu")
    model = open_clip.create_model("tiny-hps").eval()
    model.load_state_dict(torch.load(hpsv2, weights_only=True)["state_dict"])
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD))
    texts = ["a red hat", "a photo"]
    for shape in ((64, 64), (48, 71), (20, 31)):
        tensors, pictures = smooth_pictures(*shape)
        with torch.no_grad():
            pixels = torch.stack([(by_hpsv2(picture, 32) - mean) / std for picture in pictures])
            image = model.encode_image(pixels, normalize=True)
            expected = (image * model.encode_text(open_clip.get_tokenizer("tiny-hps")(texts), normalize=True)).sum(-1)
            torch.testing.assert_close(reward(tensors, texts, [{}] * 2), expected, atol=1e-3, rtol=0)
    assert reward.name == "hpsv2" and reward.card.measures.startswith("human preference")


def test_pickscore_s_last_layer_can_learn(pickscore: Path, tmp_path: Path) -> None:
    """`adversarial_preference` on it: the same scores until the layer has learned, and its own afterwards."""
    Image.new("RGB", (32, 32), "red").save(tmp_path / "reference.png")
    given = {"model": str(pickscore), "device": "cpu"}
    plain = load_reward("pickscore", **given)
    images, prompts = torch.rand(3, 3, 40, 40, generator=torch.Generator().manual_seed(0)), ["a", "b", "c"]
    for settings in ({"layers": 1, "learning_rate": 1e-2}, {"layers": len(plain.image_layers), "learning_rate": 1e-2}):
        reward = load_reward(
            "adversarial_preference", reward="pickscore", references=str(tmp_path), **settings, **given
        )
        reward.overtaken = lambda gap, mean: torch.ones_like(gap, dtype=torch.bool)
        before = plain(images, prompts, [{}] * 3)
        assert torch.allclose(reward(images, prompts, [{}] * 3), before, atol=1e-5)
        reward.observe(images, prompts, [{}] * 3, [1, 2, 3])
        assert reward.learn(lambda total: total)["steps"] == 9
        assert not torch.allclose(reward(images, prompts, [{}] * 3), before, atol=1e-3)
        assert torch.equal(plain(images, prompts, [{}] * 3), before)


@pytest.mark.long
def test_the_embedding_rewards_conform(pickscore: Path, hpsv2: str, tmp_path: Path) -> None:
    direction = tmp_path / "direction.safetensors"
    a_direction().save(direction)
    for reward in (
        load_reward("pickscore", model=str(pickscore), device="cpu"),
        load_reward("hpsv2", weights=hpsv2, model="tiny-hps", device="cpu"),
        load_reward(f"d2:{PLUGIN}", direction=str(direction)),
    ):
        assert {reward.embeds, reward.differentiable} == {True}  # type: ignore[attr-defined]
        results = examine(reward, IMAGES, TEXTS)
        assert [result for result in results if not result.passed] == []
        assert {"gradient", "embeddings"} <= {result.title for result in results}


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("pickscore", {"model": "/nowhere"}, 'pickscore: cannot load "/nowhere"'),
        ("pickscore", {"precision": "int8"}, 'unknown precision "int8"'),
        ("hpsv2", {"weights": "nowhere.pt"}, 'hpsv2: no file of weights "nowhere.pt"'),
        ("hpsv2", {}, "name its file as `weights`"),
        ("d2:clip", {"direction": "nowhere.safetensors"}, "`diffrl d2align learn CONFIG` writes one"),
        ("d2:clip", {}, 'the parameter "direction" is required'),
        ("clip:clip", {}, 'unknown parameter "reward"'),
    ],
)
def test_mistakes_are_one_clear_line(name: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_reward(name, **params)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# the direction's file and the corrected reward


def test_a_direction_reads_back_to_the_bit(tmp_path: Path) -> None:
    written, file = a_direction(), tmp_path / "deep" / "direction.safetensors"
    written.save(file)
    read = load_direction(file)
    assert torch.equal(read.vector, written.vector) and torch.equal(read.probes, written.probes)
    assert read.identity == IDENTITY and file.stat().st_size < 10_000
    file.write_bytes(b"no safetensors at all")
    with pytest.raises(UserError, match=r"direction\.safetensors: not a direction that"):
        load_direction(file)


def test_a_direction_is_refused_by_another_reward_model_and_both_are_named(tmp_path: Path) -> None:
    file = tmp_path / "direction.safetensors"
    a_direction().save(file)
    load_reward("d2", reward=PLUGIN, direction=str(file))
    with pytest.raises(UserError) as caught:
        load_reward("d2", reward=PLUGIN, direction=str(file), seed=1)
    assert f"learned for the reward model {PLUGIN}" in str(caught.value) and "learn a direction for" in str(
        caught.value
    )
    with pytest.raises(UserError, match="learned for the reward model"):
        load_reward("d2:clip", direction=str(file))  # other width, too
    with pytest.raises(UserError, match=r'reward ".*redness\.py:Redness" does not embed its prompts'):
        load_reward("d2", reward=REDNESS, direction=str(file))


def test_the_corrected_reward_is_the_guided_score(tmp_path: Path) -> None:
    file, base, direction = tmp_path / "direction.safetensors", Embedder(only="red"), a_direction()
    direction.save(file)
    plugin: Any = load_reward(f"d2:{PLUGIN}", direction=str(file), only="red")
    wider: Any = load_reward(f"d2:{PLUGIN}", direction=str(file), omega=3.0)
    for reward, omega in ((plugin, 2.0), (wider, 3.0)):
        guided = guided_embedding(base.embed_text(TEXTS), direction.vector, omega)
        expected = (base.embed_image(IMAGES) * guided).sum(-1)
        torch.testing.assert_close(reward(IMAGES, TEXTS, [{}] * 4), expected)
    assert plugin.applies("red a", {}) and not plugin.applies("blue b", {})
    assert plugin.norm == pytest.approx(float(direction.vector.norm()))
    plain = Corrected(base)  # type: ignore[arg-type]
    assert torch.equal(plain(IMAGES, TEXTS, [{}] * 4), base(IMAGES, TEXTS, [{}] * 4)) and plain.norm == 0.0


def test_the_corrected_rewards_card_bounds_its_scores() -> None:
    """|e~| is at most omega + |omega - 1|, so a cosine becomes at most that; bounds are of the wider side."""
    base: Any = Embedder()
    for bounds, omega, reach in (((-1.0, 1.0), 1.5, 2.0), ((-2.0, 3.0), 3.0, 15.0), ((-1.0, 1.0), 0.25, 1.0)):
        base.card = Card(measures="m", range=bounds, citation="c", weights="w", licence="l", cost="c", exploits="e")
        card: Any = Corrected(base, omega).card
        assert card.range == (-reach, reach) and "corrected" in card.measures
    base.card = Card(measures="m", range=(0, math.inf), citation="c", weights="w", licence="l", cost="c", exploits="e")
    assert Corrected(base).card.range == (-math.inf, math.inf)


def test_names_of_wrapped_rewards() -> None:
    assert split_name("d2:clip") == ("d2", "clip") and split_name("clip") == ("clip", None)
    assert split_name("d2:my/file.py:Mine") == ("d2", "my/file.py:Mine")
    assert split_name("my/file.py:Mine") == ("my/file.py:Mine", None) == split_name("my/file.py:Mine")
    check_plugin("d2:clip")
    check_plugin(f"d2:{PLUGIN}")
    with pytest.raises(UserError, match=r'unknown reward "clop" \(nearest: "clip"\)'):
        check_plugin("d2:clop")


# what a config may ask


def refused(config_file: Any, *overrides: str, **sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_config(config_file("mistake", **sections), overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rewards_that_do_not_fit_are_refused_when_the_config_is_read(config_file: Any) -> None:
    alone = {"redness": {"plugin": PLUGIN}}
    assert "does not embed its prompts (`embeds`), so d2align cannot correct it; clip, pickscore, hpsv2 do" in refused(
        config_file, d2align={}
    )
    assert 'is not differentiable, and objective "direct" back-propagates' in refused(config_file, objective="direct")
    wrapped = refused(config_file, rewards={"redness": {"plugin": "d2", "reward": REDNESS, "direction": "x"}})
    assert '"d2" corrects rewards that declare `embeds`, and' in wrapped
    both = refused(config_file, d2align={}, rewards={"e": {"plugin": PLUGIN}})
    assert "d2align.reward: null, but there are 2 rewards; name one of e, redness" in both
    assert '(nearest: "redness")' in refused(config_file, d2align={"reward": "rednes"})
    assert 'd2align.direction: no file "x"' in refused(config_file, d2align={"direction": "x"}, rewards=alone)
    again = {"redness": {"plugin": f"d2:{PLUGIN}", "direction": "x"}}
    assert "is corrected already; leave out the section d2align" in refused(config_file, d2align={}, rewards=again)
    steps = refused(config_file, objective="direct", direct={"timesteps": 4}, rewards=alone)
    assert "direct.timesteps: 4 timesteps, but the schedule has only 3" in steps
    watch = {"gold": {"plugin": REDNESS}}
    gated = refused(config_file, objective="direct", rewards=alone, watch=watch, gardo={"auxiliary": ["gold"]})
    assert "gardo.diversity: group_mean shapes advantages" in gated
    assert load_config(config_file("right", objective="direct", d2align={}, rewards=alone)).d2align


def test_the_command_says_what_is_missing(config_file: Any, capsys: pytest.CaptureFixture) -> None:
    for words, said in (
        (["lern"], 'unknown command "d2align lern" (nearest: "learn")'),
        (["learn"], "no CONFIG; name a YAML file"),
        (["learn", str(config_file())], "d2align: the section is missing"),
    ):
        assert main(["d2align", *words]) == 2
        assert said in capsys.readouterr().err


# stage 1's pool, and what the direction means


def test_the_pool_has_different_prompts_and_enough_images() -> None:
    prompts = [Prompt(str(i)) for i in range(10)]
    few, one = pool_prompts(prompts, 7, seed=0)
    assert (len({p.text for p in few}), one) == (7, 1)
    assert few != pool_prompts(prompts, 7, seed=1)[0]
    every, several = pool_prompts(prompts, 25, seed=0)
    assert (len({p.text for p in every}), several) == (10, 3)


def test_evidence_by_hand() -> None:
    reward: Any = Embedder()
    e_text = reward.embed_text(["red", "blue"])
    across = torch.nn.functional.normalize(reward.embed_text(["above"])[0], dim=0)
    # Image 0 fits its prompt, image 1 the direction, images 2 and 3 half of each.
    e_img = torch.stack([e_text[0], across, (e_text[0] + across) / 2, (e_text[1] + 0.2 * across) / 2])
    owner = torch.tensor([0, 0, 0, 1])
    found = evidence(reward, e_img, e_text, owner, 9.0 * across, 1.5, ["red above", "above below"])
    plain = (e_img * e_text[owner]).sum(1)
    guided = (e_img * guided_embedding(e_text, 9.0 * across)[owner]).sum(1)
    for column, scores in ((0, plain), (1, guided)):
        order = scores.argsort(descending=True).tolist()
        assert [row[column] for row in found["ranks"]] == [order.index(i) + 1 for i in range(4)]
    assert found["fallen"][0]["image"] == 0 and found["risen"][0]["image"] == 1
    assert found["risen"][0]["plain"] == pytest.approx(float(plain[1]))
    assert all(row["rank_corrected"] > row["rank_plain"] for row in found["fallen"])
    assert found["words"]["nearest"][0] == ["above", pytest.approx(1.0)]
    assert found["words"]["nearest"][0][1] > found["words"]["farthest"][0][1]
    assert -1 <= found["spearman"] < 1


def test_the_page_shows_the_evidence_and_escapes_it(tmp_path: Path) -> None:
    assert write_page(tmp_path) is None
    evil = "<script>alert(1)</script>"
    folder = tmp_path / "d2align"
    folder.mkdir()
    save_image(torch.rand(3, 8, 8), folder / "image-00003.png", {})
    row = {"image": 3, "plain": 0.5, "corrected": 0.1, "rank_plain": 1, "rank_corrected": 20}
    found = {
        "reward": evil,
        "omega": 1.5,
        "images": 20,
        "spearman": 0.25,
        "ranks": [[i, 21 - i] for i in range(1, 21)],
        "course": [[0, 0.2, 0.0], [10, 0.4, 0.7]],
        "fallen": [{**row, "prompt": evil, "file": "image-00003.png"}],
        "risen": [{**row, "prompt": "gone", "file": "absent.png"}],
        "words": {"nearest": [[evil, 0.5]], "farthest": [["blue", -0.25]]},
    }
    (folder / "evidence.json").write_text(json.dumps(found))
    page = write_page(tmp_path)
    assert page is not None
    text = page.read_text()
    assert evil not in text and text.count("&lt;script&gt;") >= 3
    assert "rank 1 → 20" in text and "+0.500" in text and "-0.250" in text and "data:image/png;base64," in text
    assert "rank correlation is 0.250" in text and "gone" not in text and "http" not in text.replace("http-equiv", "")
