"""Scores that the originals' own code gives, in a process that sees their packages before ours.

    python originals.py NAME FOLDER

builds the class of the original NAME with random weights and small sizes, saves it under FOLDER in the original's own
file format, and scores every picture of FOLDER/pictures.json with every prompt. FOLDER/scores.json has the scores
(pictures x prompts) and how the reward here is given the same files. What the originals import for other purposes than
scores (trainers, progress bars, downloads) is empty here.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image
from torch import nn

Score = Callable[[str, str], float]  # (path of a picture, prompt)
CLIP_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2}
MERGES = "bpe_simple_vocab_16e6.txt.gz"
WORDS = "the a photo of two dogs cat red bench old master style and with on in picture sign says yes no good bad"
TEXTS = [
    WORDS,
    *WORDS.split(),
    "Does this figure show it? Please answer yes or no.",
    "excellent good fair poor bad",
] * 20


class Empty:
    """Stands for whatever is imported and not used here."""

    def __init__(self, *args: Any, **more: Any) -> None: ...


class Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty


def stub(*names: str, **values: Any) -> None:
    for name in names:
        module = Stub(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        vars(module).update(values)
        sys.modules[name] = module


def parents(*names: str) -> None:
    """Packages of which only some modules are wanted: their `__init__` would import everything."""
    for name in names:
        folder = next(Path(entry, *name.split(".")) for entry in sys.path if Path(entry, *name.split(".")).is_dir())
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights under which scores differ between pictures and between prompts."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            noise = 1.5 * noise * parameter[0].numel() ** -0.5
        else:
            noise = 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)
        parameter.data = noise.to(parameter.dtype)
    return module.eval()


def clip_vocabulary(folder: Path) -> Path:
    """CLIP's merges from open_clip's wheel, as its files in transformers' format; the path of the merges."""
    import importlib.util

    place = importlib.util.find_spec("open_clip")
    assert place is not None and place.origin is not None
    merges = Path(place.origin).parent / MERGES
    lines = gzip.decompress(merges.read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, shown), *(chr(256 + i) for i in range(256 - len(shown)))]
    tokens = [*letters, *(letter + "</w>" for letter in letters), *("".join(line.split()) for line in lines)]
    words = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    return merges


def openai_clip(folder: Path) -> Any:
    """OpenAI's own class at ViT-L/14's width of embeddings; `clip.load` gives it, with its own preprocessing."""
    from packaging import version as packaged

    stub("pkg_resources", packaging=type("packaging", (), {"version": packaged}))
    import clip

    text = (77, 49408, 64, 1, 2)
    model = shaken(clip.model.CLIP(768, 224, 2, 64, 32, *text))
    torch.save(model.state_dict(), folder / "clip.pt")
    architecture = {"embed_dim": 768, "quick_gelu": True, "text_cfg": CLIP_TEXT}
    architecture["vision_cfg"] = {"image_size": 224, "layers": 2, "width": 64, "patch_size": 32}
    (folder / "tiny-openai.json").write_text(json.dumps(architecture))
    clip.load = lambda *args, **more: (model, clip.clip._transform(224))
    return clip


def image_reward_package() -> None:
    stub("fairscale", "fairscale.nn", "fairscale.nn.checkpoint", "fairscale.nn.checkpoint.checkpoint_activations")
    stub("ImageReward.ReFL")  # a trainer
    parents("ImageReward", "ImageReward.models", "ImageReward.models.BLIP")


def clip(folder: Path) -> tuple[Score, dict[str, Any]]:
    openai_clip(folder)
    image_reward_package()
    from ImageReward.models.CLIPScore import CLIPScore

    model = CLIPScore(None, "cpu")
    params = {"model": "tiny-openai", "pretrained": "clip.pt"}
    return lambda path, prompt: model.score(prompt, path), {
        "plugin": "clip",
        **params,
        "of": f"OpenAI's CLIP in image-reward {version('image-reward')}",
    }


def aesthetic(folder: Path) -> tuple[Score, dict[str, Any]]:
    openai_clip(folder)
    image_reward_package()
    from ImageReward.models.AestheticScore import AestheticScore

    model = AestheticScore(None, "cpu")
    shaken(model.mlp)
    torch.save(model.mlp.state_dict(), folder / "head.pth")
    return lambda path, prompt: model.score(prompt, path), {
        "plugin": "aesthetic",
        "head": "head.pth",
        "clip": "tiny-openai",
        "pretrained": "clip.pt",
        "of": f"LAION's linear head in image-reward {version('image-reward')}",
    }


def aesthetic_relu(folder: Path) -> tuple[Score, dict[str, Any]]:
    """LAION's head with ReLU: the layers of simple-aesthetics-predictor's class, on OpenAI's own CLIP."""
    clip = openai_clip(folder)
    from aesthetics_predictor.v2 import AestheticsPredictorV2ReLU
    from transformers import CLIPVisionConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    head = shaken(AestheticsPredictorV2ReLU(CLIPVisionConfig(**sizes, projection_dim=768)).layers)
    torch.save({f"layers.{key}": value for key, value in head.state_dict().items()}, folder / "head.pth")
    model, preprocess = clip.load()

    def score(path: str, prompt: str) -> float:
        seen = model.encode_image(preprocess(Image.open(path))[None])
        return head(seen / seen.norm(dim=-1, keepdim=True)).item()

    return score, {
        "plugin": "aesthetic",
        "head": "head.pth",
        "clip": "tiny-openai",
        "pretrained": "clip.pt",
        "of": f"LAION's ReLU head in simple-aesthetics-predictor {version('simple-aesthetics-predictor')}",
    }


def aesthetic_v2_5(folder: Path) -> tuple[Score, dict[str, Any]]:
    from aesthetic_predictor_v2_5 import AestheticPredictorV2_5Model, AestheticPredictorV2_5Processor
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = SiglipVisionConfig(**sizes, image_size=384, patch_size=32)
    shaken(SiglipVisionModel(config)).save_pretrained(folder / "siglip")
    SiglipImageProcessor(
        size={"height": 384, "width": 384}, resample=3, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ).save_pretrained(folder / "siglip")
    model = AestheticPredictorV2_5Model.from_pretrained(folder / "siglip").eval()
    shaken(model.layers)
    torch.save(model.layers.state_dict(), folder / "head.pth")
    processor = AestheticPredictorV2_5Processor.from_pretrained(folder / "siglip")

    def score(path: str, prompt: str) -> float:
        pixels = processor(images=Image.open(path).convert("RGB"), return_tensors="pt").pixel_values
        return model(pixels).logits.item()

    return score, {
        "plugin": "aesthetic",
        "head": "head.pth",
        "clip": "siglip",
        "of": f"aesthetic-predictor-v2-5 {version('aesthetic-predictor-v2-5')}",
    }


def hpsv2(folder: Path) -> tuple[Score, dict[str, Any]]:
    stub("clint", "clint.textui", "turtle", "webdataset", "braceexpand")
    parents("hpsv2")  # of which only the scorer is wanted
    place = Path(sys.modules["hpsv2"].__path__[0], "src", "open_clip", MERGES)
    if not place.is_file():  # the wheel was published without it
        place.write_bytes(clip_vocabulary(folder).read_bytes())
    import hpsv2.img_score as scorer
    import hpsv2.src.open_clip as theirs

    architecture = {"embed_dim": 96, "text_cfg": CLIP_TEXT}
    architecture["vision_cfg"] = {"image_size": 224, "layers": 2, "width": 64, "head_width": 32, "patch_size": 32}
    for name in ("ViT-H-14", "tiny-hps"):
        (folder / f"{name}.json").write_text(json.dumps(architecture))
    theirs.add_model_config(folder / "ViT-H-14.json")
    model, _, preprocess = theirs.create_model_and_transforms(
        "ViT-H-14", None, precision="amp", device="cpu", light_augmentation=True, aug_cfg={}, output_dict=True,
        with_score_predictor=False, with_region_predictor=False,
    )  # fmt: skip
    shaken(model)
    torch.save({"state_dict": model.state_dict()}, folder / "HPS.pt")
    scorer.model_dict |= {"model": model, "preprocess_val": preprocess}
    cp = str(folder / "HPS.pt")
    return lambda path, prompt: float(scorer.score(path, prompt, cp=cp)[0]), {
        "plugin": "hpsv2",
        "weights": "HPS.pt",
        "model": "tiny-hps",
        "of": f"hpsv2 {version('hpsv2')}",
    }


def imagereward(folder: Path) -> tuple[Score, dict[str, Any]]:
    image_reward_package()
    letters = [chr(i) for i in range(33, 127)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, *letters, *("##" + letter for letter in letters), *WORDS.split()]
    tokens = list(dict.fromkeys(token.lower() if token not in special else token for token in tokens))
    named = folder / "bert-base-uncased"  # found before the hub's
    named.mkdir()
    for place in (named, folder):
        (place / "vocab.txt").write_text("\n".join(tokens) + "\n")
        (place / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    os.chdir(folder)
    config = {
        "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 256,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
        "num_hidden_layers": 2, "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": len(tokens) + 2,
        "encoder_width": 128, "add_cross_attention": True,
    }  # fmt: skip
    (folder / "med_config.json").write_text(json.dumps(config))
    from ImageReward import ImageReward as module
    from ImageReward.models.BLIP import blip_pretrain
    from ImageReward.models.BLIP.vit import VisionTransformer

    sizes = {"patch_size": 16, "embed_dim": 128, "depth": 2, "num_heads": 2}
    blip_pretrain.create_vit = lambda vit, size, *rest: (VisionTransformer(img_size=size, **sizes), 128)
    model = module.ImageReward(str(folder / "med_config.json"), "cpu")
    shaken(model)
    torch.save(model.state_dict(), folder / "ImageReward.pt")
    return lambda path, prompt: model.score(prompt, path), {
        "plugin": "imagereward",
        "model": ".",
        "of": f"image-reward {version('image-reward')}",
    }


def pickscore(folder: Path) -> tuple[Score, dict[str, Any]]:
    parents("t2v_metrics", "t2v_metrics.models", "t2v_metrics.models.clipscore_models")
    from t2v_metrics.models.clipscore_models import pickscore_model as module
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizerFast

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 49408, "bos_token_id": 49406, "eos_token_id": 49407}
    config = CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 224, "patch_size": 32})
    model = shaken(CLIPModel(config))
    model.logit_scale.data = torch.tensor(4.6052)  # ln 100
    model.save_pretrained(folder)
    clip_vocabulary(folder)
    words = CLIPTokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    CLIPProcessor(CLIPImageProcessor(), words).save_pretrained(folder)
    for kind in (module.AutoProcessor, module.AutoModel):
        kind.from_pretrained = lambda name, load=kind.from_pretrained: load(folder)
    original = module.PickScoreModel(device="cpu", cache_dir=str(folder))
    return lambda path, prompt: original.forward([path], [prompt]).item(), {
        "plugin": "pickscore",
        "model": ".",
        "scale": False,
        "of": f"PickScore in t2v-metrics {version('t2v-metrics')}",
    }


def qwen_words(folder: Path) -> Any:
    """A byte-pair tokenizer with Qwen's special tokens and a chat template as its models have it."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2TokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(word[:i], word[i]) for word in WORDS.split() for i in range(1, len(word))]
    tokens = dict.fromkeys([*letters, *(a + b for a, b in pairs)])
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(f"{a} {b}" for a, b in dict.fromkeys(pairs)))
    words = Qwen2TokenizerFast(
        str(folder / "vocab.json"), str(folder / "merges.txt"), pad_token=special[0], eos_token=special[2],
        additional_special_tokens=[*special[1:], "<|video_pad|>"],
    )  # fmt: skip
    words.chat_template = (
        "{% for m in messages %}{% if loop.first %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}<|im_start|>"
        "{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|>"
        "<|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return words


def hpsv3(folder: Path) -> tuple[Score, dict[str, Any]]:
    stub("trl", RewardTrainer=object, get_kbit_device_map=Empty, get_quantization_config=lambda config: None)
    stub("fire", "datasets", "peft", "decord", "matplotlib", "matplotlib.pyplot", "matplotlib.patches")
    stub("torch.utils.tensorboard")
    from hpsv3 import inference, train
    from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT
    from safetensors.torch import save_file
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessor, Qwen2VLProcessor

    words = qwen_words(folder)
    backbone = folder / "backbone"
    ids = {name: words.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start")}
    config = Qwen2VLConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(words) + 40, image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"], rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    )  # fmt: skip
    Qwen2VLForConditionalGeneration(config).save_pretrained(backbone)
    Qwen2VLProcessor(Qwen2VLImageProcessor(), words, chat_template=words.chat_template).save_pretrained(backbone)
    settings = f"""
    {{rm_head_type: ranknet, lora_enable: false, model_name_or_path: {backbone}, use_special_tokens: true,
    reward_token: special, output_dim: 2, disable_flash_attn2: true, bf16: false, torch_dtype: float32, report_to: none,
    output_dir: {folder / "out"}, use_cpu: true}}"""
    (folder / "config.yaml").write_text(settings)
    made: list[Qwen2VLRewardModelBT] = []
    create = train.create_model_and_processor

    def random_weights(*args: Any, **more: Any) -> Any:
        model, processor, peft = create(*args, **more)
        if not made:
            made.append(shaken(model))
            state = {key: value.contiguous() for key, value in model.state_dict().items()}
            save_file(state, folder / "HPSv3.safetensors")
        return model, processor, peft

    inference.create_model_and_processor = random_weights
    (folder / "HPSv3.safetensors").touch()
    judge = inference.HPSv3RewardInferencer(str(folder / "config.yaml"), str(folder / "HPSv3.safetensors"), "cpu")

    @torch.no_grad()
    def score(path: str, prompt: str) -> float:
        return judge.reward([path], [prompt])[0][0].item()

    package = Path(inference.__file__).parent / "dataset" / "data_collator_qwen.py"
    return score, {
        "plugin": "hpsv3",
        "weights": "HPSv3.safetensors",
        "backbone": "backbone",
        "precision": "fp32",
        "instruction": str(package),
        "of": f"hpsv3 {version('hpsv3')}",
    }


def pieces(path: Path, **more: Any) -> None:
    """A small sentencepiece model of the letters and some words."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS, "".join(map(chr, range(33, 127)))]), model_writer=model, minloglevel=2,
        hard_vocab_limit=False, **more,
    )  # fmt: skip
    path.write_bytes(model.getvalue())


def vqascore(folder: Path) -> tuple[Score, dict[str, Any]]:
    base = "t2v_metrics.models.vqascore_models"
    parents("t2v_metrics", "t2v_metrics.models", base)
    from t2v_metrics.models.vqascore_models import clip_t5_model as module
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, T5Tokenizer, T5TokenizerFast

    pieces(folder / "spiece.model", vocab_size=300, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, model_type="unigram")
    words = T5Tokenizer(str(folder / "spiece.model"), extra_ids=0)
    words.save_pretrained(folder / "model")
    T5TokenizerFast(str(folder / "spiece.model"), extra_ids=0).save_pretrained(folder / "model")  # both, as published
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
    tower = str(folder / "tower")
    shaken(CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=336, patch_size=42))).save_pretrained(tower)
    CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}).save_pretrained(tower)
    config = module.CLIPT5ForConditionalGeneration.config_class(
        vocab_size=len(words), d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, pad_token_id=0,
        mm_vision_tower=tower, mm_hidden_size=64, mm_projector_type="mlp2x_gelu", mm_vision_select_layer=-2,
        mm_vision_select_feature="patch",
    )  # fmt: skip
    model = shaken(module.CLIPT5ForConditionalGeneration(config), 1)
    model.save_pretrained(folder / "model", safe_serialization=False)  # as published
    module.CLIP_T5_MODELS["tiny"] = {
        "tokenizer": {"path": str(folder / "model"), "model_max_length": 2048},
        "model": {"path": str(folder / "model"), "conversation": "t5_chat", "image_aspect_ratio": "pad"},
    }
    judge = module.CLIPT5Model("tiny", "cpu", str(folder))
    judge.model.load_state_dict(model.state_dict())
    judge.model.float()  # it loads in bfloat16
    judge.model.load_state_dict(model.state_dict())
    return lambda path, prompt: judge.forward([path], [prompt]).item(), {
        "plugin": "vqascore",
        "model": "model",
        "precision": "fp32",
        "of": f"CLIP-FlanT5 in t2v-metrics {version('t2v-metrics')}",
    }


def hpsv3pp(folder: Path) -> tuple[Score, dict[str, Any]]:
    """HPSv3++'s class and its own batches, under the transformers of ours: it was written for 4.57 and later."""
    stub("trl", "fire", "datasets", "peft", "decord", "flash_attn", "matplotlib", "matplotlib.pyplot")
    stub("hpsv3.trainer", "hpsv3.trainer.common")  # it builds models for training
    from hpsv3 import inference
    from hpsv3.model.qwen3vl_rm import Qwen3VLRewardModelFiLMHybrid
    from transformers import (
        AutoProcessor,
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )  # fmt: skip

    words = qwen_words(folder)
    words.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]}, replace_extra_special_tokens=False)
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"))
    } | {"vision_end_token_id": words.convert_tokens_to_ids("<|vision_end|>")}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    text = {**sizes, "vocab_size": len(words), "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
            "num_key_value_heads": 2, "rope_parameters": rope, "pad_token_id": words.pad_token_id}  # fmt: skip
    vision = {**sizes, "depth": 3, "num_heads": 2, "out_hidden_size": 64, "patch_size": 16,
              "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}  # fmt: skip
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    config.pad_token_id = words.pad_token_id
    mark = words.convert_tokens_to_ids("<|Reward|>")
    model = Qwen3VLRewardModelFiLMHybrid(
        config, output_dim=2, reward_token="special", special_token_ids=[mark], rm_head_type="ranknet"
    )
    torch.save({key: value.clone() for key, value in shaken(model).state_dict().items()}, folder / "hpsv3++.pth")
    limits = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16}
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    parts = (Qwen2VLImageProcessor(**limits, **normal), words, Qwen3VLVideoProcessor(**limits))
    Qwen3VLProcessor(*parts, chat_template=words.chat_template).save_pretrained(folder / "backbone")
    config.save_pretrained(folder / "backbone")
    judge = object.__new__(inference.HPSv3RewardInferencer)
    judge.processor, judge.model = AutoProcessor.from_pretrained(folder / "backbone"), model
    judge.device, judge.use_special_tokens = "cpu", True
    package = Path(inference.__file__).parent / "dataset" / "data_collator_qwen.py"
    return lambda path, prompt: judge.reward([prompt], [path], 0.3)[0][0].item(), {
        "plugin": "hpsv3", "weights": "hpsv3++.pth", "backbone": "backbone", "precision": "fp32", "iteration": 0.3,
        "instruction": str(package), "of": "HPSv3++'s repository",
    }  # fmt: skip


def deqa(folder: Path) -> tuple[Score, dict[str, Any]]:
    stub("icecream")
    torch.Tensor.half = lambda self: self  # it scores in half precision
    from src.evaluate.scorer import Scorer
    from src.model import MPLUGOwl2LlamaForCausalLM
    from transformers import AutoModelForCausalLM, CLIPImageProcessor, LlamaTokenizer

    load = AutoModelForCausalLM.from_pretrained  # its other attention calls what this transformers does not export
    AutoModelForCausalLM.from_pretrained = lambda *args, **more: load(*args, attn_implementation="eager", **more)

    pieces(
        folder / "tokenizer.model", vocab_size=400, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
    )  # fmt: skip
    words = LlamaTokenizer(str(folder / "tokenizer.model"), legacy=False)
    words.save_pretrained(folder / "model")
    CLIPImageProcessor(size={"shortest_edge": 448}, crop_size={"height": 448, "width": 448}).save_pretrained(
        folder / "model"
    )
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    visual = {
        "visual_model": {**sizes, "image_size": 448, "patch_size": 56, "layer_norm_eps": 1e-6},
        "visual_abstractor": {**sizes, "num_learnable_queries": 8, "encoder_hidden_size": 64, "grid_size": 8},
    }
    config = MPLUGOwl2LlamaForCausalLM.config_class(
        visual_config=visual, **sizes, num_key_value_heads=4, vocab_size=len(words), attn_implementation="eager"
    )
    model = shaken(MPLUGOwl2LlamaForCausalLM(config))
    model.float().save_pretrained(folder / "model")
    judge = Scorer(str(folder / "model"), device="cpu")
    judge.model.float().load_state_dict(model.state_dict())  # it loads in half precision
    for layer in judge.model.model.layers:  # its rotary tables, too
        layer.self_attn.rotary_emb._set_cos_sin_cache(2048, "cpu", torch.float32)
    judge.weight_tensor = judge.weight_tensor.float()
    return lambda path, prompt: judge([Image.open(path)]).item(), {
        "plugin": "deqa", "model": "model", "precision": "fp32", "of": "DeQA-Score's repository",
    }  # fmt: skip


def main(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    asked = json.loads((folder / "pictures.json").read_text())
    with torch.no_grad():
        score, ours = globals()[name](folder)
        scores = [[score(path, prompt) for prompt in asked["prompts"]] for path in asked["pictures"]]
    (folder / "scores.json").write_text(json.dumps({"scores": scores, "ours": ours}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
