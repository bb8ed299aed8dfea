"""What the tool that drew a picture wrote into its file: prompt, seed and settings.

Read are PNG's text, and EXIF of JPEG, WebP, AVIF and TIFF. A text whose writer is not known is never taken for a
prompt: cameras and editors leave descriptions and comments, too. Formats, as their tools describe them:

    ComfyUI         `prompt`: JSON of nodes {id: {class_type, inputs}}, an input is a value or a link [id, output];
                    WebP: EXIF's Make, Model or ImageDescription "prompt:{...}";
                    some nodes: UserComment {"prompt": {...}}; Civitai: UserComment with the nodes themselves
    A1111, Forge,   `parameters`, or EXIF's UserComment: the prompt, "Negative prompt: ...", "Steps: 20, Seed: 1, ..."
    SD.Next
    Fooocus,        the same place, with JSON
    SwarmUI
    Draw Things     the same place, JSON with c (the prompt) and uc
    Midjourney      Description: the prompt, its switches (--ar 3:2 ...), "Job ID: ..."
    InvokeAI        `invokeai_metadata`: JSON with positive_prompt, seed, model; before 3.0 `sd-metadata`, `Dream`
    NovelAI         Software "NovelAI", Description the prompt, Comment JSON with seed, v4_prompt
    scripts         `prompt` as plain text (diffrl, and most that use diffusers), perhaps `seed` beside it
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

Texts = Mapping[str, str]
_USER_COMMENT, _DETAILS = 0x9286, 0x8769  # EXIF's tags
_EXIF = {0x010E: "description", 0x010F: "make", 0x0110: "camera", 0x0131: "Software"}
_LORA = re.compile(r"\s*<(?:lora|lyco|hypernet):([^:>]+)(?::([^>]*))?>\s*,?")
_STEPS = re.compile(r"^Steps: \d+", re.MULTILINE)
_PAIR = re.compile(r'\s*([\w ./-]+):[^\S\n]*("(?:\\.|[^"\\])*"|[^,\n]*)(?:,|\n|$)')
# A setting's name here -> its names elsewhere.
SETTINGS = {
    "model": ("model", "Model", "model_name", "ckpt_name", "unet_name", "base_model", "model_weights"),
    "steps": ("steps", "Steps", "num_inference_steps"),
    "sampler": ("sampler", "sampler_name", "Sampler", "scheduler"),
    "guidance_scale": ("guidance_scale", "cfg_scale", "CFG scale", "cfg", "scale", "guidance", "cfgscale"),
    "lora": ("lora", "loras"),
}
PROMPTS = ("prompt", "positive_prompt", "text", "caption", "full_prompt")
SEEDS = ("seed", "noise_seed", "Seed")


@dataclass(frozen=True)
class Told:
    """What a file says: which tool wrote it, the prompt, the seed, and `SETTINGS` by name."""

    tool: str
    prompt: str
    seed: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def told_by(path: Path) -> Told | None:
    """What the tool wrote into this file; None where nothing that is known stands there, or the file is damaged."""
    try:
        with Image.open(path) as image:
            texts = _texts(image)
        return read_texts(texts)
    except Exception:  # what a damaged file raises depends on where it is damaged; its pixels' reader says it
        return None


def read_texts(texts: Texts) -> Told | None:
    """The first of the tools' readers that knows these texts."""
    for reader in (_comfy, _invoke, _novel, _midjourney, _parameters, _plain):
        told = reader(texts)
        if told is not None and told.prompt.strip():
            settings = {key: value for key, value in told.settings.items() if value not in (None, "")}
            return Told(told.tool, told.prompt.strip(), told.seed, settings)
    return None


def flat(values: Mapping[str, Any], tool: str) -> Told | None:
    """A table with a prompt, a seed and settings under one of the usual names, small or capital."""
    values = {**{key.lower().replace(" ", "_"): value for key, value in values.items()}, **values}
    prompt = next((values[key] for key in PROMPTS if isinstance(values.get(key), str)), None)
    return None if prompt is None else Told(tool, prompt, whole(_first(values, SEEDS)), settings_of(values))


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plainly(found) for name, keys in SETTINGS.items() if (found := _first(values, keys)) is not None}


def whole(value: Any) -> int | None:
    """A seed, which may be written as text or as a table's 7.0; None for anything else, and for -1, "any"."""
    try:
        found = int(re.sub(r"\.0*$", "", value.strip()) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None
    odd = isinstance(value, bool) or found < 0 or (isinstance(value, float) and found != value)
    return None if odd else found


def _first(values: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((values[key] for key in keys if values.get(key) not in (None, "", [])), None)


def _plainly(value: Any) -> Any:
    """A name in the place of a table that has one."""
    if isinstance(value, list):
        return ", ".join(str(_plainly(part)) for part in value)
    while isinstance(value, Mapping):
        value = _first(value, ("name", "model_name", "model", "lora", "key"))
    return value


def _texts(image: Image.Image) -> dict[str, str]:
    texts = {key: value for key, value in image.info.items() if isinstance(key, str) and isinstance(value, str)}
    exif = image.getexif()
    for tag, name in _EXIF.items():
        text = _decoded(exif.get(tag, ""))
        kind, colon, rest = text.partition(":")
        if colon and kind.lower() in ("prompt", "workflow") and rest.lstrip().startswith("{"):
            texts.setdefault(kind.lower(), rest)
        elif text:
            texts.setdefault(name, text)
    comment = _decoded(exif.get_ifd(_DETAILS).get(_USER_COMMENT, "")) or _decoded(image.info.get("comment", ""))
    inside = _table(comment)
    nodes = {key: value for key, value in inside.items() if isinstance(value, dict) and "class_type" in value}
    if isinstance(inside.get("prompt"), dict):  # ComfyUI's nodes for other kinds of files
        texts.setdefault("prompt", json.dumps(inside["prompt"]))
    elif nodes:  # Civitai's, with words of its own beside them
        texts.setdefault("prompt", json.dumps(nodes))
    elif "Comment" in inside or "Description" in inside:  # NovelAI's WebP
        texts |= {"Software": "NovelAI"} | {key: value for key, value in inside.items() if isinstance(value, str)}
    elif inside or _STEPS.search(comment):
        texts.setdefault("parameters", comment)
    return texts


def _decoded(value: Any) -> str:
    """EXIF's text: of UTF-16 in either order, UTF-8, or ASCII, with the eight bytes that name it or without, and with
    the mark of their order or without."""
    if isinstance(value, str):
        return value.strip("\ufeff")
    if not isinstance(value, bytes):
        return ""
    name, body = value[:8].rstrip(b"\0 "), value[8:]
    if name == b"UNICODE":
        forms = [body.decode(order, errors="replace") for order in ("utf-16-be", "utf-16-le")]
        if b"\0" not in body and "\ufffd" not in (text := body.decode(errors="replace")):
            forms.append(text)
        return max(forms, key=lambda text: sum(letter < "\x80" for letter in text)).strip("\0\ufeff")
    named = name in (b"ASCII", b"JIS", b"") and len(value) > 8
    return (body if named else value).decode(errors="replace").strip("\0 \ufeff")


def _table(text: str | None) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    try:
        found = json.loads(text) if text and text.lstrip().startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# --- the tools -------------------------------------------------------------------------------------------------------


def _plain(texts: Texts) -> Told | None:
    text = texts.get("prompt", "")
    if text.lstrip().startswith(("{", "[")):
        return flat(_table(text), "the files' metadata")
    told = flat(texts, "the files' metadata") if text else None
    if told is not None and (member := whole(texts.get("member"))) is not None:  # diffrl's: the seed is the whole job's
        told = Told(told.tool, told.prompt, None, {**told.settings, "member": member})
    return told


def _parameters(texts: Texts) -> Told | None:
    text = texts.get("parameters", "")
    if table := _table(text):
        table |= {"prompt": table["c"]} if "uc" in table and "c" in table else {}
        return flat(table.get("sui_image_params", table), "the files' metadata")
    return webui(text) if _STEPS.search(text) else None


def webui(text: str) -> Told:
    """A1111's `parameters`. Tags of LoRAs are no part of the prompt, so that it is the same with and without one."""
    last = list(_STEPS.finditer(text))
    head = text[: last[-1].start()] if last else text
    values = {key.strip(): value.strip('"') for key, value in _PAIR.findall(text[last[-1].start() :] if last else "")}
    prompt = re.split(r"^Negative prompt:", head, maxsplit=1, flags=re.MULTILINE)[0]
    loras = ", ".join(f"{name} {weight}".strip() for name, weight in _LORA.findall(prompt))
    settings = settings_of(values) | ({"lora": loras} if loras else {})
    return Told("A1111's metadata", _LORA.sub(" ", prompt).strip(" ,\n"), whole(values.get("Seed")), settings)


def _invoke(texts: Texts) -> Told | None:
    if table := _table(texts.get("invokeai_metadata")):
        return flat(table, "InvokeAI's metadata")
    if table := _table(texts.get("sd-metadata")):
        image = table.get("image", {})
        prompt = image.get("prompt")
        if isinstance(prompt, list):
            prompt = ", ".join(str(part.get("prompt", "")) for part in prompt)
        return flat({**table, **image, "prompt": prompt}, "InvokeAI's metadata")
    found = re.match(r'"(.*)"(.*)$', texts.get("Dream", texts.get("dream", "")), re.DOTALL)
    if found is None:
        return None
    seed = re.search(r"-S\s*(\d+)", found[2])
    return Told("InvokeAI's metadata", found[1], whole(seed[1]) if seed else None)


def _midjourney(texts: Texts) -> Told | None:
    found = re.match(r"(.+?)(\s--\w.*)?\s+Job ID: [0-9a-f-]{36}$", texts.get("Description", ""), re.DOTALL)
    if found is None:
        return None
    switches = dict(re.findall(r"--(\w+)\s+([^\s-]\S*)", found[2] or ""))
    model = {"model": f"Midjourney {switches['v']}"} if "v" in switches else {}
    return Told("Midjourney's metadata", found[1], whole(switches.get("seed")), model)


def _novel(texts: Texts) -> Told | None:
    if not texts.get("Software", "").startswith("NovelAI"):
        return None
    comment = _table(texts.get("Comment"))
    caption = (comment.get("v4_prompt") or {}).get("caption") or {}
    people = [str(one.get("char_caption", "")) for one in caption.get("char_captions") or []]
    base = caption.get("base_caption") or comment.get("prompt") or texts.get("Description", "")
    prompt = " | ".join(part for part in [base, *people] if part)
    settings = settings_of(comment) | {"model": texts.get("Source")}
    return Told("NovelAI's metadata", prompt, whole(comment.get("seed")), settings)


# --- ComfyUI ---------------------------------------------------------------------------------------------------------

# Inputs with a conditioning's text, the first group that a node has; of one group all that differ, joined.
_WORDS = tuple(
    re.compile(pattern)
    for pattern in (
        r"populated_text$",
        r"positive(_prompt)?$|text_positive$",
        r"(text|string|prompt|value)(_?[a-z0-9])?$|t5xxl$|clip_[lg]$|llama$|mt5xl$|bert$",
    )
)
_NO_WORDS = re.compile(r"(negative|clip|model|vae|control_net|images?|pixels|latent.*|samples|mask|.*vision.*|sigmas)$")
_LATENT = ("latent_image", "samples", "latent", "pixels", "image", "images")


def _comfy(texts: Texts) -> Told | None:
    nodes = {key: node for key, node in _table(texts.get("prompt")).items() if isinstance(node, dict)}
    if not nodes or not all("class_type" in node for node in nodes.values()):
        return None
    graph = _Graph(nodes)
    found = {(text, graph.seed(name)): name for name in graph.first_samplers() if (text := graph.prompt(name))}
    if len({text for text, _ in found}) != 1:  # none, or several pictures of other texts: whose this one is, is unknown
        return None
    ((text, seed), name), *_ = found.items()
    return Told("ComfyUI's metadata", text, seed, graph.settings(name))


class _Graph:
    """The nodes of a picture, walked against the links, from what is saved to what it was made of."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self.inputs: dict[str, dict[str, Any]] = {str(k): dict(node.get("inputs") or {}) for k, node in nodes.items()}
        self.kinds = {str(k): str(node["class_type"]) for k, node in nodes.items()}

    def link(self, value: Any) -> str | None:
        """The node that an input comes from; None for a value."""
        linked = isinstance(value, list) and len(value) == 2 and str(value[0]) in self.inputs
        return str(value[0]) if linked and isinstance(value[1], int) else None

    def above(self, start: Iterable[str], keys: Iterable[str] | None = None) -> Iterator[str]:
        """These nodes and all that they are made of (by these inputs), nearest first."""
        queue, seen = list(start), set(start)
        for name in queue:
            yield name
            for key, value in self.inputs[name].items():
                before = self.link(value)
                if before is not None and before not in seen and (keys is None or key in keys):
                    seen.add(before)
                    queue.append(before)

    def first_samplers(self) -> list[str]:
        """Samplers of what is saved that go on from no other sampler's picture."""
        used = {before for inputs in self.inputs.values() for v in inputs.values() if (before := self.link(v))}
        ends = [name for name in self.inputs if name not in used]
        saved = [name for name in ends if "save" in self.kinds[name].lower()] or ends
        samplers = [name for name in self.above(saved) if self._samples(name)]

        def goes_on(name: str) -> bool:
            latents = [before for key in _LATENT if (before := self.link(self.inputs[name].get(key)))]
            return any(other != name and self._samples(other) for other in self.above(latents, _LATENT))

        return [name for name in samplers if not goes_on(name)]

    def _samples(self, name: str) -> bool:
        inputs = self.inputs[name]
        return ("positive" in inputs or "guider" in inputs) and any(
            k in inputs for k in ("seed", "noise_seed", "noise")
        )

    def prompt(self, sampler: str) -> str:
        inputs = self.inputs[sampler]
        value = inputs.get("positive")
        if value is None and (guider := self.link(inputs.get("guider"))):
            given = self.inputs[guider]
            value = given.get("positive", given.get("conditioning", given.get("cond1")))
        return self._text(value, set()).strip()

    def _text(self, value: Any, seen: set[str]) -> str:
        if isinstance(value, str):
            return value
        name = self.link(value)
        if name is None or name in seen or self.kinds[name] == "ConditioningZeroOut":
            return ""
        seen = seen | {name}
        inputs = self.inputs[name]
        if (chosen := f"input{inputs.get('select')}") in inputs:  # a switch
            return self._text(inputs[chosen], seen)
        for group in _WORDS:
            parts = [self._text(inputs[key], seen) for key in sorted(inputs) if group.match(key)]
            parts = [part for part in parts if part.strip()]
            if parts and "find" in inputs:
                text, (find, words) = parts[0], (self._text(inputs.get(k), seen) for k in ("find", "replace"))
                return "" if "regex" in self.kinds[name].lower() else text.replace(find, words) if find else text
            if parts:  # of an encoder's several texts each once; a text node puts together what it is given
                joins = "delimiter" in inputs or "concat" in self.kinds[name].lower()
                return str(inputs.get("delimiter", ", ")).join(parts if joins else dict.fromkeys(parts))
        linked = [self._text(v, seen) for key, v in inputs.items() if self.link(v) and not _NO_WORDS.match(key)]
        return ", ".join(dict.fromkeys(part for part in linked if part.strip()))

    def _value(self, sampler: str, keys: Iterable[str], by: Iterable[str]) -> Any:
        """The nearest value of an input of these names, above a sampler."""
        for name in self.above([sampler], by):
            for key in keys:
                value = self.inputs[name].get(key)
                if value is not None and not isinstance(value, list):
                    return value
        return None

    def seed(self, sampler: str) -> int | None:
        keys = ("seed", "noise_seed", "value", "int", "number")
        return whole(self._value(sampler, keys, ("seed", "noise_seed", "noise", "value", "int", "number")))

    def settings(self, sampler: str) -> dict[str, Any]:
        ways = ("model", "guider", "sigmas", "sampler", "steps", "cfg")
        above = list(self.above([sampler], ways))
        loras = [str(self.inputs[name]["lora_name"]) for name in above if "lora_name" in self.inputs[name]]
        found: dict[str, Any] = {
            "model": self._value(sampler, ("ckpt_name", "unet_name", "model_name", "gguf_name"), ways),
            "lora": ", ".join(loras),
            "steps": self._value(sampler, ("steps",), ways),
            "sampler": self._value(sampler, ("sampler_name",), ways),
            "guidance_scale": self._value(sampler, ("cfg",), ways),
        }
        return {key: value for key, value in found.items() if value is not None}
