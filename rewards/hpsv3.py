"""HPSv3 and HPSv3++: human preference, read by a small head from one token of a Qwen-VL that sees image and prompt.

The published files hold a Qwen2-VL (HPSv3) or Qwen3-VL (++) whole, with `rm_head` in the place of words; ++ scales and
shifts the token's state before the head by two conditions (FiLM): the generator's capability, which it guesses from the
state, and how far a training has come. Shapes: B images, D the width of a state.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl_zoo import loading
from diffrl_zoo.aesthetic import linear_chain
from diffrl_zoo.cards import card_of
from diffrl_zoo.clip import fit
from diffrl_zoo.vision import complete

REPOSITORY, FILE = "MizzenAI/HPSv3", "HPSv3.safetensors"
BACKBONES = {"qwen2_vl": "Qwen/Qwen2-VL-7B-Instruct", "qwen3_vl": "Qwen/Qwen3-VL-8B-Instruct"}
MARK, PLACE = "<|Reward|>", "{text_prompt}"
SIDE = 28  # the sides of a picture are multiples of it
PIXELS = 256 * SIDE**2  # about as many has every picture
INSTRUCTION = Path("dataset", "data_collator_qwen.py")  # in the original's package
HEAD, CONDITION, FILM, CAPABILITY = "rm_head.", "cond_encoder.", "film_gen.", "cap_encoder."
BESIDE = ("lm_head.", HEAD, CONDITION, FILM, CAPABILITY)  # tensors that are not the backbone's
# Names of transformers when the files were made, and now: HPSv3's is from before both halves were under `model`.
NAMES = {r"^model\.(?!visual\.|language_model\.)": "language_model.", r"^model\.": ""}


class HPSv3:
    """The mean of the preference that HPSv3's head gives image and prompt, about 0 to 15; without bounds.

    `weights`: a `.safetensors` or `.pth` of HPSv3 or HPSv3++, told apart by their keys (None: HPSv3's from the hub).
    `backbone`: hub id or folder of the Qwen-VL that it was trained from, of which only the configuration, tokenizer and
    image processor are read (None: the published one). `instruction`: what the judge is told, a file: the original's
    `data_collator_qwen.py`, or a text with {text_prompt} and <|Reward|> (None: that of the installed package `hpsv3`;
    the one of HPSv3++ is another). `iteration`: HPSv3++'s condition, how far the training is that made the images, in
    [0, 1] (its authors: 0 to compare models; as a reward from 0.3 to 1). `precision`: fp32, bf16 or fp16.
    """

    name = "hpsv3"
    differentiable = True
    card = card_of(name)

    def __init__(
        self,
        weights: str | None = None,
        backbone: str | None = None,
        instruction: str | None = None,
        iteration: float = 0.0,
        device: str | None = None,
        batch_size: int = 8,
        precision: str = "bf16",
    ) -> None:
        import transformers

        dtype = loading.dtype_of(precision, "hpsv3")
        if not 0.0 <= iteration <= 1.0:
            raise UserError(f"hpsv3: iteration is {iteration:g}; from 0 to 1")
        self.device, self.batch_size, self.iteration = loading.pick_device(device), batch_size, iteration
        path = loading.weights_file(weights, REPOSITORY, FILE, "hpsv3")
        tensors = _tensors(path)
        newer = any(key.startswith(FILM) for key in tensors)
        source = backbone or BACKBONES["qwen3_vl" if newer else "qwen2_vl"]
        with loading.cannot_load("hpsv3", source):
            config = loading.from_pretrained(transformers.AutoConfig, source)
            self.processor = loading.from_pretrained(transformers.AutoProcessor, source)
        if config.model_type not in BACKBONES:
            raise UserError(f'hpsv3: "{source}" is a {config.model_type}, not one of {", ".join(BACKBONES)}')
        self.asked = _instruction(instruction, newer)
        self.tokenizer: Any = self.processor.tokenizer
        self.tokenizer.add_special_tokens({"additional_special_tokens": [MARK]}, replace_extra_special_tokens=False)
        self.mark = self.tokenizer.convert_tokens_to_ids(MARK)
        self.tokenizer.padding_side = "right"
        kinds = {"qwen2_vl": transformers.Qwen2VLModel, "qwen3_vl": transformers.Qwen3VLModel}
        self.network: Any = _network(kinds[config.model_type], config, tensors, dtype, str(path))
        self.network.to(self.device)
        self.image_token: int = config.image_token_id
        self.spatial = config.model_type == "qwen3_vl"  # HPSv3 was trained with image tokens counted like words
        head = linear_chain(_part(tensors, HEAD), nn.ReLU, f"hpsv3: the head of {path}", outputs=None)
        self.head = head.to(self.device)
        self.film: Film | None = Film(tensors, config.text_config.hidden_size).to(self.device) if newer else None

    @staticmethod
    def footprint(backbone: str | None, weights: str | None, precision: str, **_: Any) -> int | None:
        """Bytes of its weights, by the backbone's config; of a file whose backbone is not named it cannot say."""
        source = backbone or (BACKBONES["qwen2_vl"] if weights is None else None)
        return loading.transformers_bytes("AutoModel", source, precision) if source else None

    def preprocess(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) in [0, 1] to the backbone's patches (B h w, 3 t p p) and grids (B, 3); differentiable."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        settings = self.processor.image_processor
        patch, merge, times = settings.patch_size, settings.merge_size, settings.temporal_patch_size
        images, limits = images.to(self.device, torch.float32), settings.size
        edges = (limits["shortest_edge"], limits["longest_edge"])
        # Twice, as in the original: its own sides, and then those that this backbone's image processor allows.
        for side, (least, most) in ((SIDE, (PIXELS, PIXELS)), (patch * merge, edges)):
            height, width = images.shape[-2:]
            images = fit(images, smart_resize(height, width, side, least, most), "squash")
        mean, std = loading.channels(self.device, settings.image_mean, settings.image_std)
        count, (high, wide) = len(images), (images.shape[-2] // patch, images.shape[-1] // patch)
        # Patches in the order in which merge x merge of them become one token, each repeated in time.
        parts = ((images - mean) / std).view(count, 3, high // merge, merge, patch, wide // merge, merge, patch)
        parts = parts.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6).expand(*(-1,) * 6, times, -1, -1)
        grid = torch.tensor([[1, high, wide]] * count, device=self.device)
        return parts.reshape(count * high * wide, -1), grid

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]; gradients flow to the images."""
        pixels, grid = self.preprocess(images)
        inputs = self._texts(prompts, int(grid[0].prod()) // self.processor.image_processor.merge_size**2)
        ids = inputs["input_ids"]
        more: dict[str, Any] = {"mm_token_type_ids": (ids == self.image_token).int()}
        if not self.spatial:
            more = {"position_ids": torch.arange(ids.shape[1], device=self.device).expand(3, *ids.shape)}
        hidden = self.network(
            **inputs, **more, pixel_values=pixels.to(self.network.dtype), image_grid_thw=grid, use_cache=False
        ).last_hidden_state
        places = (ids == self.mark).int().cumsum(dim=1).argmax(dim=1)  # the last mark: a prompt may have one, too
        state = hidden[torch.arange(len(ids), device=self.device), places].float()
        if self.film is not None:
            state = self.film(state, self.iteration)
        return self.head(state)[:, 0]

    def _texts(self, prompts: Sequence[str], count: int) -> Any:
        """The chats of the prompts as tokens, with `count` places for the image in each."""
        image = self.tokenizer.convert_ids_to_tokens(self.image_token)
        texts = []
        for prompt in prompts:
            content = [{"type": "image"}, {"type": "text", "text": self.asked.replace(PLACE, prompt)}]
            chat = [{"role": "user", "content": content}]
            text = self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            texts.append(text.replace(image, image * count, 1))
        return self.tokenizer(texts, padding=True, return_tensors="pt").to(self.device)


class Film(nn.Module):
    """HPSv3++'s conditions: state (B, D) to state (1 + gamma) + beta, both from (capability, iteration)."""

    def __init__(self, tensors: Mapping[str, Tensor], width: int) -> None:
        super().__init__()
        where = "hpsv3: HPSv3++'s file"
        self.condition = linear_chain(_part(tensors, CONDITION), nn.GELU, where, outputs=None)
        self.film = linear_chain(_part(tensors, FILM), nn.ReLU, where, outputs=2 * width)
        self.guess = linear_chain(_part(tensors, CAPABILITY + "proj."), nn.Identity, where, outputs=None)
        self.capability = linear_chain(_part(tensors, CAPABILITY + "out_proj."), nn.Identity, where)

    def forward(self, state: Tensor, iteration: float) -> Tensor:
        # Its attention over a group of images is over one image here, so it has no part in it.
        capability = self.capability(self.guess(state)).sigmoid()
        condition = torch.cat([capability, torch.full_like(capability, iteration)], dim=1)
        gamma, beta = self.film(self.condition(condition)).chunk(2, dim=1)
        return state * (1.0 + gamma) + beta


def _tensors(path: Path) -> dict[str, Tensor]:
    """The file's tensors, of which none is a copy: they lie on the disk until they are used."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors = load_file(path)
    else:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        tensors = loaded.get("model", loaded)
    if not any(key.startswith(HEAD) for key in tensors):
        raise UserError(f"hpsv3: {path} has no tensors {HEAD}*; it is not HPSv3")
    return tensors


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _network(kind: Any, config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, where: str) -> nn.Module:
    """The backbone with the file's tensors; UserError if one is left over or lacking."""
    own = {key: tensor for key, tensor in tensors.items() if not key.startswith(BESIDE)}
    words = next((tensor for key, tensor in own.items() if key.endswith(".embed_tokens.weight")), None)
    if words is None:
        raise UserError(f"hpsv3: {where} has no embedding of words; it is not HPSv3")
    config.text_config.vocab_size = len(words)  # the tokenizer's words and the mark, where the backbone has spare rows
    try:
        return complete(kind, None, config, dtype, f"hpsv3: {where}", state_dict=own, key_mapping=NAMES)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"hpsv3: {where} does not fit its backbone: {' '.join(str(error).split())}") from error


def _instruction(file: str | None, newer: bool) -> str:
    """What the judge is told, with a place for the prompt and the mark whose state is read."""
    if file is None:
        found = None if newer else importlib.util.find_spec("hpsv3")
        if found is None or not found.submodule_search_locations:
            where = "its repository's hpsv3/" if newer else "pip install --no-deps hpsv3, or its repository's hpsv3/"
            raise UserError(f"hpsv3: the instruction is not here: {where}{INSTRUCTION}, named as `instruction`")
        file = str(Path(found.submodule_search_locations[0]) / INSTRUCTION)
    path = Path(file)
    if not path.is_file():
        raise UserError(f'hpsv3: no instruction at "{file}"')
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        values = {
            target.id: node.value.value
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        text = f"{values.get('INSTRUCTION', '')}{values.get('prompt_with_special_token', '')}"
    if text.count(PLACE) != 1 or text.count(MARK) != 1:
        raise UserError(f"hpsv3: {file} has not one {PLACE} and one {MARK}")
    return text
