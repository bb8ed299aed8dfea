"""The zoo: every plugin conforms, on tiny models of its true architecture (RapidOCR: its real weights)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from diffrl.errors import UserError
from diffrl.reward_tools.check import examine
from diffrl.reward_tools.examples import GENERAL, example_images
from diffrl.rewards import load_reward
from diffrl.rewards.scoring import Scorer
from diffrl_playground import grammar
from diffrl_playground.renderer import draw
from diffrl_playground.scenes import prompt_set
from scripts.playground.clip_building import build_clip, clip_config, save_clip
from scripts.playground.tokenizer import vocabulary, write_tokenizer

pytestmark = pytest.mark.usefixtures("one_call")

PROMPTS = ["a red circle on white", "two blue stars on black", "a red circle on white"]
IMAGES = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("clip")
    size = write_tokenizer(path, vocabulary(), grammar.LETTERS)
    torch.manual_seed(0)
    config = clip_config(size, image_size=32, width=32, layers=1, text_width=32, text_layers=1, embed_dim=16)
    config["preprocess_cfg"] |= {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}
    save_clip(build_clip(config), config, path, path)
    return str(path)


def words(count: int) -> tuple[torch.Tensor, list[str]]:
    rng = np.random.default_rng(1)
    prompts = prompt_set("words", "test")[:count]
    drawn = np.stack([draw(prompt, rng) for prompt in prompts])
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 255, prompts


def conforms(reward: Any, every: int = 4) -> None:
    images, prompts = example_images()
    bad = [result for result in examine(reward, images[::every], prompts[::every]) if not result.passed]
    assert not bad, bad


# clip


def test_clip_conforms(clip_folder: str) -> None:
    conforms(load_reward("clip", model=clip_folder, device="cpu"))


def test_clip_score_is_the_cosine_of_open_clips_features(clip_folder: str) -> None:
    import open_clip

    reward: Any = load_reward("clip", model=clip_folder, device="cpu")
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{clip_folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{clip_folder}")(PROMPTS)
    for shape in ((64, 64), (32, 32), (48, 70), (20, 31)):
        bytes_ = torch.randint(256, (3, *shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        # Noise of single pixels would test the rounding of bytes; pictures are smooth.
        smooth = torch.nn.functional.avg_pool2d(bytes_.permute(0, 3, 1, 2).float(), 5, 1, 2).round().to(torch.uint8)
        pictures = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in smooth]
        with torch.no_grad():
            expected_input = torch.stack([transform(picture) for picture in pictures])
            image = model.eval().encode_image(expected_input, normalize=True)
            expected = (image * model.encode_text(tokens, normalize=True)).sum(-1)
            found_input = reward.clip.preprocess(smooth.float() / 255)
            scores = reward(smooth.float() / 255, PROMPTS, [{}] * 3)
        assert (found_input - expected_input).abs().max() < 1.5 / 255 / 0.2  # Pillow rounds to bytes after resizing
        torch.testing.assert_close(scores, expected, atol=2e-3, rtol=0)


def test_clip_gradient_is_the_slope(clip_folder: str) -> None:
    reward: Any = load_reward("clip", model=clip_folder, device="cpu")
    images = IMAGES[:1].clone().requires_grad_()
    reward(images, PROMPTS[:1], [{}]).sum().backward()
    assert images.grad is not None
    direction = images.grad / images.grad.norm()
    step = 1e-2
    with torch.no_grad():
        up, down = (reward(images + s * direction, PROMPTS[:1], [{}]) for s in (step, -step))
    torch.testing.assert_close((up - down) / (2 * step), images.grad.norm()[None], rtol=2e-2, atol=1e-6)


def test_clip_scales_shares_and_lowers_precision(clip_folder: str) -> None:
    plain, scaled = (load_reward("clip", model=clip_folder, device="cpu", scale=s) for s in (False, True))
    score = plain(IMAGES, PROMPTS, [{}] * 3)
    torch.testing.assert_close(scaled(IMAGES, PROMPTS, [{}] * 3), 100 * score)
    assert scaled.card.range == (-100.0, 100.0) and scaled.clip is plain.clip  # type: ignore[attr-defined]
    half: Any = load_reward("clip", model=clip_folder, device="cpu", precision="bf16")
    assert half.clip is not plain.clip and half(IMAGES, PROMPTS, [{}] * 3).dtype == torch.float32  # type: ignore[attr-defined]
    torch.testing.assert_close(half(IMAGES, PROMPTS, [{}] * 3), score, atol=0.02, rtol=0)


def test_clip_can_resize_bilinearly_as_flow_grpos_clipscore_does(clip_folder: str) -> None:
    from torchvision.transforms import CenterCrop, Compose, Resize

    plain, soft = (load_reward("clip", model=clip_folder, device="cpu", interpolation=i) for i in (None, "bilinear"))
    own: Any = Compose([Resize(soft.clip.size[0]), CenterCrop(soft.clip.size[0])])  # type: ignore[attr-defined]
    noise = torch.rand(2, 3, 90, 131, generator=torch.Generator().manual_seed(0))
    for image in (noise, IMAGES):
        found = soft.clip.preprocess(image) * soft.clip.std + soft.clip.mean  # type: ignore[attr-defined]
        torch.testing.assert_close(found, own(image), atol=1e-6, rtol=0)
    assert soft.clip.model is plain.clip.model  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="resizes by shortest, nearest, which is not supported"):
        load_reward("clip", model=clip_folder, device="cpu", interpolation="nearest")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"model": "ViT-B-323"}, 'nor a model of open_clip (nearest: "ViT-B-32")'),
        ({"model": "ViT-B-32"}, "needs `pretrained`, one of: openai, laion400m"),
        ({"model": "/nowhere"}, "neither a folder with open_clip_config.json"),
        ({"precision": "int8"}, 'unknown precision "int8"'),
        ({"device": "gpu"}, 'unknown device "gpu"'),
    ],
)
def test_clip_mistakes_are_one_clear_line(clip_folder: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_reward("clip", **({"model": clip_folder} | params))
    assert said in str(caught.value) and "\n" not in str(caught.value)


# aesthetic


def test_aesthetic_is_the_head_on_the_shared_embedding(clip_folder: str, tmp_path: Path) -> None:
    head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    file = tmp_path / "head.safetensors"
    save_file(head.state_dict(), file, metadata={"activation": "relu"})
    reward: Any = load_reward("aesthetic", head=str(file), clip=clip_folder, device="cpu")
    clip: Any = load_reward("clip", model=clip_folder, device="cpu")
    assert reward.clip is clip.clip
    with torch.no_grad():
        torch.testing.assert_close(reward(IMAGES, PROMPTS, [{}] * 3), head(clip.embed_image(IMAGES)).squeeze(1))
    conforms(reward)


def test_laions_head_is_read_from_its_shapes(tmp_path: Path) -> None:
    from diffrl_zoo.aesthetic import load_head

    class Laion(nn.Module):
        """The head of LAION's aesthetic predictor v2: dropout between the layers, no activation."""

        def __init__(self) -> None:
            super().__init__()
            widths = [(768, 1024), (1024, 128), (128, 64), (64, 16), (16, 1)]
            linear = [nn.Linear(*pair) for pair in widths]
            drop = [nn.Dropout(p) for p in (0.2, 0.2, 0.1)]
            self.layers = nn.Sequential(linear[0], drop[0], linear[1], drop[1], linear[2], drop[2], *linear[3:])

    torch.manual_seed(0)
    model = Laion().eval()
    x = nn.functional.normalize(torch.randn(4, 768), dim=-1)
    save_file(model.state_dict(), tmp_path / "laion.safetensors")
    torch.save(model.state_dict(), tmp_path / "laion.pth")
    for name in ("laion.safetensors", "laion.pth"):
        head = load_head(tmp_path / name)
        torch.testing.assert_close(head(x), model.layers(x))
        assert not any(p.requires_grad for p in head.parameters())


def test_laions_head_with_relu_is_known_by_its_layers_numbers(tmp_path: Path) -> None:
    """`ava+logos-l14-reluMSE.pth`: linear, ReLU, dropout three times, linear, ReLU, linear."""
    from diffrl_zoo.aesthetic import load_head

    class Laion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts: list[nn.Module] = []
            for pair, drop in (((768, 1024), 0.2), ((1024, 128), 0.2), ((128, 64), 0.1)):
                parts += [nn.Linear(*pair), nn.ReLU(), nn.Dropout(drop)]
            self.layers = nn.Sequential(*parts, nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))

    torch.manual_seed(0)
    model, x = Laion().eval(), 20 * torch.randn(64, 768)
    torch.save(model.state_dict(), tmp_path / "relu.pth")
    torch.testing.assert_close(load_head(tmp_path / "relu.pth")(x), model.layers(x))
    other = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 1))})
    torch.save(other.state_dict(), tmp_path / "other.pth")
    with pytest.raises(UserError, match="its layers 0, 2 are no published head's; add the safetensors metadata"):
        load_head(tmp_path / "other.pth")


def test_heads_that_cannot_be_right_are_refused(clip_folder: str, tmp_path: Path) -> None:
    file = tmp_path / "head.safetensors"

    def refused(module: nn.Module, **metadata: str) -> str:
        save_file(module.state_dict(), file, metadata=metadata or None)
        with pytest.raises(UserError) as caught:
            load_reward("aesthetic", head=str(file), clip=clip_folder, device="cpu")
        return str(caught.value)

    two = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    assert "does not say its activation" in refused(two)
    assert 'unknown activation "rellu" (nearest: "relu")' in refused(two, activation="rellu")
    assert "embeddings of width 12" in refused(nn.Sequential(nn.Linear(12, 1)))
    assert "ends in 3 numbers instead of one" in refused(nn.Sequential(nn.Linear(16, 3)))
    assert "not a chain of linear layers" in refused(nn.Sequential(nn.Conv2d(3, 1, 3)))
    with pytest.raises(UserError, match="no head at /nowhere"):
        load_reward("aesthetic", head="/nowhere", clip=clip_folder)


# ocr


def test_ocr_reads_rendered_words() -> None:
    images, prompts = words(40)
    reward = load_reward("ocr")
    assert reward(images, prompts, [{}] * 40).tolist() == [1.0] * 40
    # The wrong word: the share of letters that are in place at least, and never fully right.
    other = reward(images, prompts[1:] + prompts[:1], [{}] * 40)
    different = [a.split('"')[1] != b.split('"')[1] for a, b in zip(prompts, prompts[1:] + prompts[:1], strict=True)]
    assert other[torch.tensor(different)].max() <= 2 / 3 + 1e-6


def test_ocr_conforms_and_judges_quoted_text_only() -> None:
    reward = load_reward("ocr", threads=1)
    conforms(reward)
    prompts = [SimpleNamespace(text=text, metadata={}) for text in ("a red circle on white", 'the word "kup" on white')]
    scores = Scorer({"ocr": reward}).score(IMAGES[:2], prompts)  # type: ignore[arg-type]
    assert scores[:, 0].isnan().tolist() == [True, False]


def test_ocr_detects_text_in_larger_images() -> None:
    images, prompts = words(1)
    reward: Any = load_reward("ocr")
    canvas = torch.ones(2, 3, 256, 256)
    canvas[0, :, 150:214, 20:84] = images[0]
    assert reward.read(canvas)[1] == ""
    assert reward(canvas, [prompts[0]] * 2, [{}] * 2).tolist() == [1.0, 0.0]


def test_ocr_score_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    reward: Any = load_reward("ocr", threads=1)
    text = ""
    monkeypatch.setattr(reward, "read", lambda images: [text] * len(images))

    def score(prompt: str) -> float:
        return reward(torch.zeros(1, 3, 8, 8), [prompt], [{}]).item()

    text = "Hello  WORLD"
    assert score('a sign that says "hello world"') == 1.0
    assert score('signs "Hello" and "World"') == 1.0
    assert score('a sign "help"') == 0.0  # 7 edits, 4 letters: never below 0
    text = "helo"
    assert score('a sign "hello"') == pytest.approx(0.8)
    text = "xhellox"
    assert score('a sign "hello"') == pytest.approx(0.6)
    reward.contained = True
    assert score('a sign "hello"') == 1.0
    text = ""
    assert score("the cat's sign says 'open'") == 0.0


def test_quoted_text_and_edit_distance() -> None:
    from diffrl_zoo.ocr import edit_distance, quotes

    assert quotes('a "b c" and "d"') == ["b c", "d"]
    assert quotes("a dog's sign 'go'") == ["go"]
    assert quotes("“Café” neon") == ["Café"]
    assert quotes("the dog's and the cat's toys") == []
    assert quotes('an empty "" sign and "  "') == []
    assert [edit_distance(*pair) for pair in (("", "abc"), ("kitten", "sitting"), ("abc", "abc"), ("ab", "ba"))] == [
        3,
        3,
        0,
        2,
    ]


# playground


def test_playground_conforms_and_is_right_on_true_images() -> None:
    images, prompts = example_images()
    world = [i for i in range(len(prompts) - len(GENERAL)) if i % 3][::2]  # every third shows something else
    modes = {mode: load_reward("playground", mode=mode) for mode in ("reward", "strict", "all_right")}
    conforms(modes["reward"])
    for mode, reward in modes.items():
        scores = reward(images[world], [prompts[i] for i in world], [{}] * len(world))
        assert scores.mean() > 0.97, mode
        assert not reward.applies("a photo of a dog", {})  # type: ignore[attr-defined]


def test_playground_facts_pick_what_counts() -> None:
    rng = np.random.default_rng(0)
    drawn = draw("a red circle on white", rng)
    image = torch.from_numpy(drawn.copy()).permute(2, 0, 1)[None].float() / 255
    colour, shape, count = (load_reward("playground", mode="strict", facts=[k]) for k in ("color", "shape", "count"))
    prompt = "a red square on white"
    assert colour(image, [prompt], [{}]).tolist() == [1.0] and shape(image, [prompt], [{}]).tolist() == [0.0]
    both = load_reward("playground", mode="strict", facts=["color", "shape"])
    assert both(image, [prompt], [{}]).tolist() == [0.5]
    every = load_reward("playground", mode="all_right", facts=["color", "shape"])
    assert every(image, [prompt], [{}]).tolist() == [0.0]
    assert not count.applies(prompt, {}) and count.applies("two red circles on white", {})  # type: ignore[attr-defined]


def test_playground_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r'unknown mode "strikt" \(nearest: "strict"\)'):
        load_reward("playground", mode="strikt")
    with pytest.raises(UserError, match=r'unknown kind of fact "colour" \(nearest: "color"\)'):
        load_reward("playground", facts=["colour"])


def test_artefact_is_small_on_true_images_and_large_on_noise() -> None:
    reward = load_reward("artefact")
    conforms(reward, every=16)
    images, prompts = example_images()
    true, prompts = images[1:72:5], prompts[1:72:5]
    noise = torch.rand(true.shape, generator=torch.Generator().manual_seed(0))
    found = [reward(x, prompts, [{}] * len(prompts)).mean().item() for x in (true, noise)]
    assert found[0] < 0.4 * found[1], found


# the shipped weights


@pytest.mark.parametrize("name", ["clip", "aesthetic", "preference"])
def test_shipped_rewards_conform(name: str) -> None:
    conforms(load_reward(name, device="cpu"))


def test_shipped_clip_tells_prompts_apart() -> None:
    """Most pictures are nearer to their own prompt than to nine tenths of the others."""
    images, prompts = example_images()
    world = [i for i in range(len(prompts) - len(GENERAL)) if i % 3]
    reward: Any = load_reward("clip", device="cpu")
    with torch.no_grad():
        cosines = reward.embed_image(images[world]) @ reward.embed_text([prompts[i] for i in world]).T
    above = (cosines > cosines.diagonal()[:, None]).float().mean(1)
    assert (above < 0.1).float().mean() > 0.8


def test_preference_likes_what_was_planted() -> None:
    """The same scenes but for the style or the tone: the planted one wins nearly always; so does the right shape."""
    rng = np.random.default_rng(0)
    reward = load_reward("preference", device="cpu")

    def points(said: str, prompt: str = "a red circle on white") -> torch.Tensor:
        drawn = np.stack([draw(said, np.random.default_rng(seed)) for seed in rng.permutation(16)])
        images = torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 255
        return reward(images, [prompt] * 16, [{}] * 16)

    plain = points("a red circle on white, filled, plain")
    assert points("a red circle on white, striped, plain").mean() > plain.mean()
    assert points("a red circle on white, filled, pale").mean() > plain.mean()
    assert points("a red star on white, filled, plain").mean() < plain.mean()
    assert "striped" in reward.card.exploits and "pale" in reward.card.exploits


def test_modes_of_the_verifier_share_one_look_at_an_image(monkeypatch) -> None:
    """Watching the strict score beside the reward reads each picture once; a changed one is read again."""
    from diffrl_playground import verifier

    looks = []
    views = verifier.views
    monkeypatch.setattr(verifier, "views", lambda pixels: (looks.extend(pixels), views(pixels))[1])
    images, prompts = torch.rand(2, 3, 64, 64), ["a red circle on white", "a blue star on black"]
    reward, strict = load_reward("playground"), load_reward("playground", mode="strict")
    first = reward(images, prompts, [{}, {}])
    strict(images, prompts, [{}, {}])
    assert len(looks) == 2
    images.fill_(1.0)
    images[:, :, :3, 5:9] = 0.37  # a picture that no other test of the process has had looked at
    assert not torch.equal(reward(images, prompts, [{}, {}]), first) and len(looks) == 3  # two equal pictures
    reward(images, list(reversed(prompts)), [{}, {}])
    assert len(looks) == 3
