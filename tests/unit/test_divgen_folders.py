"""Pictures as other tools write them: prompts and seeds read right, and nothing foreign taken for a prompt.

Files are made here from the formats' public descriptions, with texts and names of our own.
"""

from __future__ import annotations

import csv
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from diffrl.divgen.embedded import read_texts, told_by
from diffrl.divgen.folders import Pictures, read_folder
from diffrl.divgen.scoring import score_folder
from diffrl.errors import UserError

TEXTS = ["a clay teapot on a shelf, morning", "two paper boats\non a pond"]
PIXELS = {"identity": "none", "style": "none", "layout": "none", "features": "pixels", "lpips": "none"}
Writer = Callable[[str, int], Mapping[str, str] | bytes]


def nodes(text: str, seed: int) -> dict[str, Any]:
    """A graph with a second pass, a LoRA, a text node of its own and a ControlNet between text and sampler."""
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "own.safetensors"}},
        "2": {
            "class_type": "LoraLoader",
            "inputs": {"lora_name": "clay.safetensors", "strength_model": 0.7, "model": ["1", 0], "clip": ["1", 1]},
        },
        "3": {"class_type": "PrimitiveString", "inputs": {"value": text}},
        "4": {"class_type": "CLIPTextEncode", "inputs": {"text": ["3", 0], "clip": ["2", 1]}},
        "5": {"class_type": "CLIPTextEncode", "inputs": {"text": "blurred", "clip": ["2", 1]}},
        "6": {
            "class_type": "ControlNetApplyAdvanced",
            "inputs": {"positive": ["4", 0], "negative": ["5", 0], "image": ["13", 0], "strength": 1.0},
        },
        "7": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "8": {
            "class_type": "KSampler",
            "inputs": {
                "seed": ["12", 0],
                "steps": 24,
                "cfg": 6.5,
                "sampler_name": "euler",
                "scheduler": "normal",
                "model": ["2", 0],
                "positive": ["6", 0],
                "negative": ["6", 1],
                "latent_image": ["7", 0],
            },
        },
        "9": {
            "class_type": "KSampler",
            "inputs": {
                "seed": 5,
                "steps": 9,
                "cfg": 2.0,
                "sampler_name": "ddim",
                "scheduler": "normal",
                "denoise": 0.3,
                "model": ["2", 0],
                "positive": ["14", 0],
                "negative": ["5", 0],
                "latent_image": ["8", 0],
            },
        },
        "10": {"class_type": "VAEDecode", "inputs": {"samples": ["9", 0], "vae": ["1", 2]}},
        "11": {"class_type": "SaveImage", "inputs": {"filename_prefix": "out", "images": ["10", 0]}},
        "12": {"class_type": "Seed", "inputs": {"seed": seed}},
        "13": {"class_type": "LoadImage", "inputs": {"image": "pose.png"}},
        "14": {"class_type": "CLIPTextEncode", "inputs": {"text": "fine details", "clip": ["2", 1]}},
        "15": {"class_type": "CLIPTextEncode", "inputs": {"text": "linked to nothing", "clip": ["2", 1]}},
    }


def flux(text: str, seed: int) -> dict[str, Any]:
    """A sampler of parts: noise, guider, guidance."""
    return {
        "a": {"class_type": "UNETLoader", "inputs": {"unet_name": "flux.safetensors"}},
        "b": {"class_type": "CLIPTextEncodeFlux", "inputs": {"t5xxl": text, "clip_l": text, "guidance": 3.5}},
        "c": {"class_type": "FluxGuidance", "inputs": {"guidance": 3.5, "conditioning": ["b", 0]}},
        "d": {"class_type": "BasicGuider", "inputs": {"model": ["a", 0], "conditioning": ["c", 0]}},
        "e": {"class_type": "RandomNoise", "inputs": {"noise_seed": seed}},
        "f": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "g": {"class_type": "BasicScheduler", "inputs": {"steps": 20, "model": ["a", 0]}},
        "h": {
            "class_type": "SamplerCustomAdvanced",
            "inputs": {"noise": ["e", 0], "guider": ["d", 0], "sampler": ["f", 0], "sigmas": ["g", 0]},
        },
        "i": {"class_type": "SaveImage", "inputs": {"images": ["h", 0]}},
    }


def webui(text: str, seed: int) -> str:
    tail = f"Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: {seed}, Size: 64x64, Model: own"
    tail += ', Lora hashes: "clay: 12, x: 3", Version: f2.0'
    return f"{text} <lora:clay:0.8>\nNegative prompt: blurred, Steps: none\n{tail}"


def exif(text: str, tag: int = 0x9286) -> bytes:
    """EXIF with a user comment in UTF-16, or with a text under another tag."""
    made = Image.Exif()
    if tag == 0x9286:
        made.get_ifd(0x8769)[tag] = b"UNICODE\0" + text.encode("utf-16-be")
    else:
        made[tag] = text
    return made.tobytes()


TOOLS: dict[str, tuple[str, Writer]] = {
    "comfy": ("ComfyUI", lambda t, s: {"prompt": json.dumps(nodes(t, s)), "workflow": '{"nodes": []}'}),
    "flux": ("ComfyUI", lambda t, s: {"prompt": json.dumps(flux(t, s))}),
    "comfy.webp": ("ComfyUI", lambda t, s: exif("prompt:" + json.dumps(nodes(t, s)), 0x0110)),
    "comfy.jpg": ("ComfyUI", lambda t, s: exif(json.dumps({"prompt": flux(t, s), "workflow": {}}))),
    "webui": ("A1111", lambda t, s: {"parameters": webui(t, s)}),
    "webui.jpg": ("A1111", lambda t, s: exif(webui(t, s))),
    "webui.webp": ("A1111", lambda t, s: exif(webui(t, s))),
    "fooocus": ("metadata", lambda t, s: {"parameters": json.dumps({"prompt": t, "seed": str(s), "steps": 30})}),
    "swarm": ("metadata", lambda t, s: {"parameters": json.dumps({"sui_image_params": {"prompt": t, "seed": s}})}),
    "invoke": (
        "InvokeAI",
        lambda t, s: {"invokeai_metadata": json.dumps({"positive_prompt": t, "seed": s, "model": {"name": "own"}})},
    ),
    "invoke2": (
        "InvokeAI",
        lambda t, s: {"sd-metadata": json.dumps({"image": {"prompt": [{"prompt": t, "weight": 1}], "seed": s}})},
    ),
    "dream": ("InvokeAI", lambda t, s: {"Dream": f'"{t}" -s 50 -S {s} -W 64 -H 64 -C 7.5'}),
    "novel": (
        "NovelAI",
        lambda t, s: {
            "Software": "NovelAI",
            "Description": t,
            "Source": "own diffusion 4",
            "Comment": json.dumps({"seed": s, "uc": "blurred", "v4_prompt": {"caption": {"base_caption": t}}}),
        },
    ),
    "script": ("metadata", lambda t, s: {"prompt": t, "seed": str(s), "num_inference_steps": "20"}),
}


def write(path: Path, told: Mapping[str, str] | bytes = b"", value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.random.default_rng(value).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    if isinstance(told, bytes):
        image.save(path, **({"exif": told} if told else {}))
        return
    info = PngImagePlugin.PngInfo()
    for key, text in told.items():
        info.add_text(key, text)
    image.save(path, pnginfo=info)


def groups(found: Pictures) -> dict[str, list[int | None]]:
    result: dict[str, list[int | None]] = {}
    for item in found.items:
        result.setdefault(item.prompt.text if item.known else "?", []).append(item.seed)
    return result


@pytest.mark.parametrize("name", TOOLS)
def test_each_tools_pictures_are_grouped_by_its_prompts(name: str, tmp_path: Path) -> None:
    tool, writer = TOOLS[name]
    suffix = Path(name).suffix or ".png"
    for i in range(6):
        write(tmp_path / f"{i:05d}{suffix}", writer(TEXTS[i % 2], 100 + i), i)
    found = read_folder(tmp_path)
    assert groups(found) == {TEXTS[0]: [100, 102, 104], TEXTS[1]: [101, 103, 105]}
    assert found.line().startswith("6 images, 2 prompts by ") and tool in found.line() and ", 3 each" in found.line()
    settings = found.items[0].settings
    if name == "comfy":
        expected = {"model": "own.safetensors", "lora": "clay.safetensors", "steps": 24, "sampler": "euler"}
        assert settings == {**expected, "guidance_scale": 6.5}
    elif tool == "A1111":
        assert settings["lora"] == "clay 0.8" and settings["steps"] == "20" and settings["sampler"] == "Euler a"
    elif name == "invoke":
        assert settings["model"] == "own"
    scored = score_folder(tmp_path, PIXELS)
    assert scored.metrics["diversity"].prompts == 2 and len(scored.prompts) == 2


@pytest.mark.parametrize(
    "texts",
    [
        {"prompt": '{"3": {"inputs": {"seed": 1}, "class_type": "KSampler"}}'},  # a graph without a text
        {"prompt": json.dumps({**nodes("one", 1), "19": {**nodes("", 1)["11"], "inputs": {"images": ["21", 0]}}})},
        {"prompt": "[1, 2]"},
        {"Comment": "Created with an editor", "Description": "my holiday"},
        {"parameters": "gamma 2.2"},
        {"parameters": '{"exposure": 3}'},
        {"Software": "NovelAI"},
        {"description": "a photo", "make": "Camera"},
    ],
)
def test_foreign_texts_are_no_prompts(texts: dict[str, str]) -> None:
    told = read_texts(texts)
    assert told is None or told.prompt == "one"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            {"parameters": json.dumps({"c": TEXTS[0], "uc": "blur", "seed": 7, "scale": 4.5, "model": "own"})},
            (TEXTS[0], 7, {"guidance_scale": 4.5, "model": "own"}),
        ),
        (
            {"parameters": json.dumps({"Prompt": TEXTS[0], "Negative": "blur", "Seed": "7", "Steps": 30})},
            (TEXTS[0], 7, {"steps": 30}),
        ),
        (
            {"Description": f"{TEXTS[0]} --ar 3:2 --seed 7 --v 6.1 Job ID: 0123abcd-0123-4567-89ab-0123456789ab"},
            (TEXTS[0], 7, {"model": "Midjourney 6.1"}),
        ),
        ({"prompt": TEXTS[0], "seed": "7", "num_inference_steps": "25"}, (TEXTS[0], 7, {"steps": "25"})),
    ],
    ids=["c and uc", "capitals", "switches", "keys of their own"],
)
def test_tools_with_other_names(texts: dict[str, str], said: tuple[str, int, dict[str, Any]]) -> None:
    told = read_texts(texts)
    assert told is not None and (told.prompt, told.seed, told.settings) == said


BOTH = f"{TEXTS[0]}\nNegative prompt: blur\nSteps: 20, CFG scale: 7, Seed: 7"


@pytest.mark.parametrize(
    "comment",
    [
        b"UNICODE\0" + BOTH.encode("utf-16"),
        b"UNICODE\0\xfe\xff" + BOTH.encode("utf-16-be"),
        b"UNICODE\0" + BOTH.encode(),
        BOTH.encode("utf-8-sig"),
    ],
    ids=["little-endian, marked", "big-endian, marked", "UTF-8 under the other's name", "UTF-8, marked"],
)
@pytest.mark.parametrize("suffix", ["jpg", "webp"])
def test_a_comment_in_any_coding_has_the_same_prompt(comment: bytes, suffix: str, tmp_path: Path) -> None:
    """The mark of an order of bytes was a letter of the prompt, which then was another one than its neighbour's."""
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = comment
    Image.new("RGB", (8, 8)).save(tmp_path / f"a.{suffix}", exif=exif)
    told = told_by(tmp_path / f"a.{suffix}")
    assert told is not None
    assert (told.prompt, told.seed, told.settings) == (TEXTS[0], 7, {"guidance_scale": "7", "steps": "20"})


def test_lines_after_the_settings_are_not_the_last_ones_value() -> None:
    told = read_texts({"parameters": f"{BOTH}\nTemplate: a {{red|blue}} cat\nNegative Template: blur"})
    assert told is not None and (told.prompt, told.seed) == (TEXTS[0], 7)


def test_civitai_s_pictures_of_comfyui_have_nodes_and_more_in_their_comment(tmp_path: Path) -> None:
    nodes = {
        "6": {"class_type": "smZ CLIPTextEncode", "inputs": {"text": TEXTS[0]}},
        "7": {"class_type": "smZ CLIPTextEncode", "inputs": {"text": "blur"}},
        "11": {
            "class_type": "KSampler",
            "inputs": {"seed": 7, "steps": 25, "positive": ["6", 0], "negative": ["7", 0]},
        },
        "13": {"class_type": "SaveImage", "inputs": {"images": ["11", 0]}},
    }
    more = {"extra": {"airs": []}, "extraMetadata": json.dumps({"prompt": TEXTS[0], "seed": 7})}
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + json.dumps(nodes | more).encode("utf-16-be")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", exif=exif)
    told = told_by(tmp_path / "a.jpg")
    assert told is not None and (told.prompt, told.seed, told.settings) == (TEXTS[0], 7, {"steps": 25})


def test_two_saved_pictures_of_one_graph_say_nothing_unless_they_agree() -> None:
    first, second = nodes("one", 1), {f"x{k}": v for k, v in flux("other", 2).items()}
    for node in second.values():
        node["inputs"] = {k: [f"x{v[0]}", v[1]] if isinstance(v, list) else v for k, v in dict(node["inputs"]).items()}
    assert read_texts({"prompt": json.dumps(first | second)}) is None
    assert read_texts({"prompt": json.dumps(first)}) is not None


def rows(root: Path, kind: str) -> None:
    """A listing of the pictures 0 to 5, as one tool or another writes it."""
    listed = [{"file_name": f"{i}.png", "text": TEXTS[i % 2] + "\u2028\x85", "seed": i} for i in range(6)]
    if kind.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        cells = [{"bytes": (root / f"{i}.png").read_bytes(), "path": f"{i}.png"} for i in range(6)]
        table = pyarrow.table({"image": cells, "text": [row["text"] for row in listed], "seed": list(range(6))})
        (root / "data").mkdir()
        parquet.write_table(table, root / "data" / "train-0.parquet")
        for i in range(6):
            (root / f"{i}.png").unlink()
    elif kind.endswith(".csv"):
        with (root / kind).open("w", encoding="utf-8-sig", newline="") as file:
            table = csv.DictWriter(file, list(listed[0]), delimiter=";" if kind == "own.csv" else ",")
            table.writeheader()
            table.writerows(listed)
    else:
        names = {"manifest.jsonl": ("file", "prompt"), "own.jsonl": ("image_path", "caption")}.get(kind)
        text = [
            {names[0]: row["file_name"], names[1]: row["text"], "seed": row["seed"]} if names else row for row in listed
        ]
        (root / kind).write_text(
            "\n".join(json.dumps(row, ensure_ascii=False) for row in text) + "\n", encoding="utf-8"
        )


@pytest.mark.parametrize(
    "kind", ["manifest.jsonl", "metadata.jsonl", "metadata.csv", "own.csv", "own.jsonl", "data.parquet"]
)
def test_files_of_rows(kind: str, tmp_path: Path) -> None:
    for i in range(6):
        write(tmp_path / f"{i}.png", {"prompt": "what the manifest overrules"}, i)
    rows(tmp_path, kind)
    found = read_folder(tmp_path)
    assert groups(found) == {TEXTS[0] + "\u2028\x85": [0, 2, 4], TEXTS[1] + "\u2028\x85": [1, 3, 5]}
    assert [item.member for item in found.items] == [0, 1, 2, 0, 1, 2]
    assert score_folder(tmp_path, PIXELS).metrics["diversity"].prompts == 2
    if "parquet" not in kind:
        assert list(groups(read_folder(tmp_path, prompts_from="metadata"))) == ["what the manifest overrules"]


def test_names_numbers_texts_beside_and_folders(tmp_path: Path) -> None:
    made = iter(range(1000))

    def folder(name: str, *files: str, **texts: str) -> Path:
        for file in files:
            write(tmp_path / name / file, b"", next(made))
        for file, text in texts.items():
            (tmp_path / name / file.replace("__", ".")).write_text(text)
        return tmp_path / name

    seeds = folder("seeds", *(f"prompt_{p}_seed_{s}.webp" for p in (0, 1) for s in (3, 4)))
    assert groups(read_folder(seeds)) == {"prompt_0": [3, 4], "prompt_1": [3, 4]}
    (seeds / "prompts.txt").write_text("\n".join(["a tin drum", "a felt hat"]))
    assert groups(read_folder(seeds)) == {"a tin drum": [3, 4], "a felt hat": [3, 4]}
    members = folder("members", *(f"{p:05d}-{m:02d}.png" for p in (0, 1) for m in (0, 1)))
    assert {len(v) for v in groups(read_folder(members)).values()} == {2}
    lines = folder("lines", "1.png", "2.png", prompts__txt="a tin drum\na felt hat\n")
    assert groups(read_folder(lines)) == {"a tin drum": [None], "a felt hat": [None]}
    unclear = folder("unclear", *(f"{i}.png" for i in range(4)), prompts__txt="a tin drum\na felt hat\n")
    assert list(groups(read_folder(unclear))) == ["?"] and "do not say which" in read_folder(unclear).line()
    beside = folder("beside", "x.png", "y.png", x__txt="a felt hat", y__txt=webui("a felt hat", 4))
    assert groups(read_folder(beside)) == {"a felt hat": [None, 4]}
    folders = folder("folders", *(f"{p}/{i}.png" for p in ("a hat", "a drum") for i in (0, 1)))
    assert groups(read_folder(folders)) == {"a drum": [None] * 2, "a hat": [None] * 2}
    assert "2 prompts by the folders' names, 2 each" in read_folder(folders).line()
    geneval = folder("geneval", *(f"0000{p}/samples/{i}.png" for p in (0, 1) for i in (0, 1)))
    for p in (0, 1):
        (geneval / f"0000{p}" / "metadata.jsonl").write_text(json.dumps({"tag": "counting", "prompt": TEXTS[p]}))
    assert groups(read_folder(geneval)) == {text: [None] * 2 for text in TEXTS}
    alone = folder("alone", *(f"ComfyUI_{i:05d}_.png" for i in range(4)), notes__md="x", a__heic="x")
    found = read_folder(alone)
    assert list(groups(found)) == ["?"] and not any(item.known for item in found.items)
    assert "manifest.jsonl" in found.line() and "1 .heic, 1 .md" in found.line()
    assert score_folder(alone, PIXELS).metrics["diversity"].why == "of no image a prompt is known"
    assert list(groups(read_folder(alone, prompts_from="names"))) == ["ComfyUI"]


def test_a_root_of_models_is_not_one_set(tmp_path: Path) -> None:
    for model in ("one", "two", "three"):
        for i in range(4):
            told = {"prompt": TEXTS[i % 2], "seed": str(i)}
            write(tmp_path / "told" / model / f"{i}.png", told, i)
            write(tmp_path / "listed" / model / f"{i}.png", b"", i)
        listing = [json.dumps({"file": f"{i}.png", "prompt": TEXTS[i % 2]}) for i in range(4)]
        (tmp_path / "listed" / model / "manifest.jsonl").write_text("\n".join(listing))
    for name in ("told", "listed"):
        with pytest.raises(UserError, match=r"3 sets of the same prompts .* divgen report"):
            read_folder(tmp_path / name)


def test_every_kind_of_picture_and_every_name(tmp_path: Path) -> None:
    suffixes = [".JPEG", ".PNG", ".jfif", ".tif", ".gif", ".avif", ".jp2", ".tga", ".ppm", ".bmp", ".ico"]
    for i, suffix in enumerate(suffixes):
        path = tmp_path / "some" / f"{i}{suffix}"
        write(path.with_suffix(".png"), b"", i)
        if suffix != ".PNG":
            with Image.open(path.with_suffix(".png")) as image:
                image.convert("P" if suffix == ".gif" else "RGB").save(path)
        else:
            path.write_bytes(path.with_suffix(".png").read_bytes())
        path.with_suffix(".png").unlink()
    odd = os.path.join(os.fsencode(tmp_path / "some"), b"caf\xe9.png")
    Path(os.fsdecode(odd)).write_bytes((tmp_path / "some" / "1.PNG").read_bytes() + struct.pack("B", 0))
    (tmp_path / "some" / "broken.png").write_bytes(b"no picture")
    scores = score_folder(tmp_path / "some", PIXELS, prompts_from="none")
    assert scores.metrics["vendi"].images == len(suffixes) + 1
    assert [Path(line.partition(": ")[0]).name for line in scores.unreadable] == ["broken.png"]
    assert any("caf\\xe9.png" in row["prompt"] for row in scores.prompts)


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"string_a": "very", "string_b": "very", "delimiter": " "}, "very very"),
        ({"select": 2, "input1": "a red fox", "input2": "a blue fox"}, "a blue fox"),
        ({"string": "a X fox", "find": "X", "replace": "red"}, "a red fox"),
    ],
)
def test_texts_that_nodes_put_together(node: dict[str, Any], text: str) -> None:
    graph = nodes("", 1)
    graph["3"] = {"class_type": "Text", "inputs": node}
    told = read_texts({"prompt": json.dumps(graph)})
    assert told is not None and told.prompt == text


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("metadata.csv", b"file_name,text,seed\nsub\\0.png,a,7.0\nsub\\1.png,b,-1\n"),  # Windows, pandas, "any"
        (
            "metadata.csv",
            b"file_name,text,seed\nC:\\out\\sub\\0.png,a,7\n/gone/sub/1.png,b,\n",
        ),  # a folder that was moved
        ("own.csv", b"File Name, Prompt, Seed\r\nsub/0.png, a, 7\r\nsub/1.png, b,\r\n"),
        ("own.csv", "file\tprompt\tseed\nsub/0.png\ta\t7\nsub/1.png\tb\t\n".encode("utf-16")),
    ],
)
def test_tables_of_other_machines(name: str, data: bytes, tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path / "sub" / f"{i}.png", b"", i)
    (tmp_path / name).write_bytes(data)
    found = read_folder(tmp_path)
    assert groups(found) == {"a": [7], "b": [None]} and all(item.path.is_file() for item in found.items)


def test_sidecars_of_another_alphabet_are_read_or_said(tmp_path: Path) -> None:
    """One that could not be read was passed over, and the pictures had no prompts."""
    write(tmp_path / "0.png")
    (tmp_path / "0.txt").write_bytes("café\r\nau lait\r\n".encode("utf-16"))
    assert [item.prompt.text for item in read_folder(tmp_path).items] == ["café au lait"]
    (tmp_path / "0.txt").write_bytes("café".encode("cp1252"))
    with pytest.raises(UserError, match=r"0\.txt:1: not UTF-8 text \(byte 4 of the line\); save it as UTF-8"):
        read_folder(tmp_path)


def test_a_quote_that_is_not_closed_is_said_and_a_long_prompt_is_read(tmp_path: Path) -> None:
    """The rows behind it were part of its prompt; with 128 KiB and more it was a traceback."""
    for i in range(2):
        write(tmp_path / f"{i}.png", b"", i)
    for end in ("1.png,b\n", "1.png,b", "1.png," + "b" * 200_000):
        (tmp_path / "own.csv").write_text(f'file,prompt\n"0.png","a\n\n"\n{end}')
        assert sorted(groups(read_folder(tmp_path))) == ["a\n\n", end[6:].strip()]
        (tmp_path / "own.csv").write_text(f'file,prompt\n"0.png","a\n{end}')
        with pytest.raises(UserError, match=r"own\.csv:2: a quote is opened from here on, and not closed"):
            read_folder(tmp_path)


def test_a_table_of_another_alphabet_is_said(tmp_path: Path) -> None:
    write(tmp_path / "0.png")
    (tmp_path / "own.csv").write_bytes("file,prompt\n0.png,caf\xe9\n".encode("cp1252"))
    with pytest.raises(UserError, match="save it as UTF-8"):
        read_folder(tmp_path)
