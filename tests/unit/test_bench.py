"""The field's benchmarks: how each official script adds up, written out here again; files, judges, resuming."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from judges import SlowJudge
from PIL import Image

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.rewards import RewardError, load_reward
from diffrl_lab.bench.command import NAMES
from diffrl_lab.bench.facts import BENCHES
from diffrl_lab.bench.items import Answers, Item
from diffrl_lab.bench.judging import Shot, judge_all, read_answers
from diffrl_lab.bench.table import Key, Line, change, lines_of

JUDGE = '''
import torch
class Seven:
    """Answers from the brightness of the pictures; the file `fail` makes it stop after some."""
    name, asked = "seven", 0
    def __call__(self, images, prompts, metadata):
        import pathlib
        stop = pathlib.Path(__file__).with_name("fail")
        with open(pathlib.Path(__file__).with_name("asked"), "a") as file:
            file.write("x" * len(images))
        if stop.exists():
            raise ValueError("no more today")
        return images.mean(dim=(1, 2, 3))
    def answers(self, images, prompts, metadata):
        lights = self(images, prompts, metadata)
        return [[float(light) / (k + 1) for k in range(len(data["vqa_list"]))] for light, data in zip(lights, metadata)]
class Nonsense(Seven):
    def answers(self, images, prompts, metadata):
        return [["what?"] for _ in images]
'''
GENEVAL2 = [
    {"prompt": "two red cups", "atom_count": 3, "skills": ["count", "attribute"],
     "vqa_list": [["How many cups are in the image?", "two"], ["Are the cups red?", "Yes"]]},
    {"prompt": "a cat on a box", "atom_count": 4, "skills": ["object", "position", "object"],
     "vqa_list": [["Is there a cat?", "Yes"], ["Is the cat on the box?", "Yes"], ["Is there a box?", "Yes"]]},
]  # fmt: skip


def table(name: str, items: list[Item], answers: list[Answers]) -> dict[Key, Line]:
    bench = BENCHES[name]
    return lines_of([list(bench.marks(*pair)) for pair in zip(items, answers, strict=True)], bench.overall)


def geneval2(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "geneval2_data.jsonl").write_text("\n".join(map(json.dumps, GENEVAL2)) + "\n")
    return folder


def written(path: Path, rows: list[list[str]], delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


# how the official scripts add up


def test_geneval_averages_tasks(tmp_path: Path) -> None:
    rows = [{"tag": tag, "include": [], "prompt": f"{tag} {i}"} for tag, n in (("a", 3), ("b", 7)) for i in range(n)]
    (tmp_path / "evaluation_metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    items, dice = BENCHES["geneval"].read(tmp_path), random.Random(0)
    answers: list[Answers] = [{"geneval": [[float(dice.random() < 0.5)] for _ in range(4)]} for _ in items]
    lines = table("geneval", items, answers)
    verdicts = [[v for (v,) in one["geneval"]] for one in answers]
    first, second = (fmean(v for row in part for v in row) for part in (verdicts[:3], verdicts[3:]))
    assert lines["Task", "a"].value == pytest.approx(first) and lines["Task", "b"].value == pytest.approx(second)
    assert lines["Overall", "Overall"].value == pytest.approx((first + second) / 2)
    assert lines["All", "correct images"].value == pytest.approx(fmean(v for row in verdicts for v in row))
    assert lines["All", "correct prompts (any image)"].value == pytest.approx(fmean(any(row) for row in verdicts))


def test_geneval2_has_both_means_skills_and_atoms(tmp_path: Path) -> None:
    items = BENCHES["geneval2"].read(geneval2(tmp_path))
    answers: list[Answers] = [{"vlm": [[0.9, 0.4]]}, {"vlm": [[0.8, 0.1, 0.6]]}]
    lines = table("geneval2", items, answers)
    known = {key: round(line.value, 9) for key, line in lines.items()}
    assert known["Soft-TIFA", "AM (parts)"] == pytest.approx(100 * ((0.9 + 0.4) / 2 + (0.8 + 0.1 + 0.6) / 3) / 2)
    whole = [100 * geometric_mean([0.9, 0.4]), 100 * geometric_mean([0.8, 0.1, 0.6])]
    assert known["Soft-TIFA", "GM (whole prompts)"] == pytest.approx(fmean(whole))
    assert known["Skill (AM)", "object"] == pytest.approx(100 * (0.8 + 0.6) / 2)
    assert known["Atoms (GM)", "4"] == pytest.approx(whole[1])
    assert table("geneval2", items[:1], [{"vlm": [[0.9, 0.0]]}])["Soft-TIFA", "GM (whole prompts)"].value == 0.0


def graph(tmp_path: Path, dice: random.Random) -> list[tuple[str, list[tuple[int, list[int], str]]]]:
    """Prompts with random question graphs, written as the official file; its first row is one that is skipped."""
    head = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    head += "question_natural_language"
    prompts, rows = (
        [],
        [head.split(","), ["p0", "prompt 0", "", "1", "0", "", "", "entity - whole (skipped)", "skipped?"]],
    )
    for p in range(12):
        asked = []
        for q in range(2, 9):
            parents = sorted(dice.sample(range(2, q), min(q - 2, dice.randint(1, 2)))) or [0]
            asked.append((q, parents, dice.choice(["entity - whole", "attribute - color", "global - "])))
        for q, parents, kind in asked:
            above = ", ".join(map(str, parents))
            rows.append([f"p{p}", f"prompt {p}", "", str(q), above, "", "", f"{kind} (it)", f"{p} {q}?"])
        prompts.append((f"prompt {p}", asked))
    rows.append(["p99", "orphan", "", "5", "1", "", "", "entity - whole (orphan)", "orphan?"])
    written(tmp_path / "dpg_bench" / "dpg_bench.csv", rows)
    return prompts


def test_dpgs_dependency_rule(tmp_path: Path) -> None:
    dice = random.Random(3)
    prompts = graph(tmp_path, dice)
    items = BENCHES["dpg"].read(tmp_path)
    assert [item.text for item in items] == [text for text, _ in prompts]  # the orphan's parent is not there
    answers: list[Answers] = [{"vlm": [[dice.random() for _ in asked] for _ in range(4)]} for _, asked in prompts]
    shares, entities = [], []
    for (_, asked), one in zip(prompts, answers, strict=True):
        for values in one["vlm"]:
            holds: dict[int, bool] = {}
            for (q, parents, _), value in zip(asked, values, strict=True):  # parents come before their children here
                holds[q] = value > 0.5 and all(holds[parent] for parent in parents if parent)
            shares.append(sum(holds.values()) / len(holds))
        entities += [v > 0.5 for (_, _, kind), v in zip(asked, one["vlm"][-1], strict=True) if "whole" in kind]
    lines = table("dpg", items, answers)
    assert lines["DPG-Bench", "score"].value == pytest.approx(100 * fmean(shares))
    assert lines["Category", "entity"].value == pytest.approx(100 * fmean(entities))  # the last image, without the rule
    assert lines["Detail", "entity - whole"].value == lines["Category", "entity"].value


def unigenbench(folder: Path, point: str = "Attribute - Size") -> Path:
    told = {"Testpoints": [point, "Style"], "Testpoint Description": ["a tall hat", "in ink"]}
    rows = [["index", "prompt_en", "sub_dims_en"], ["0", "a tall hat, {ink}", json.dumps(told)]]
    written(folder / "data" / "test_prompts_en.csv", rows)
    (folder / "eval" / "src").mkdir(parents=True, exist_ok=True)
    (folder / "eval" / "src" / "eval_common.py").write_text(
        "import os\nraise SystemExit('this is read and never run')\n"
        'EXPLANATION_DICT_EN = {"Attribute - Size": "how large", "Style": "of art"}\n'
        'SYSTEM_PROMPT_EN_TEMPLATE = """{prompt}|{testpoint}|{explanation}|{test_explanation}"""\n'
        'LANG_CONFIGS = {"en": {"explanation_dict": EXPLANATION_DICT_EN, "checkpoint_header": "Defined",\n'
        '"checkpoint_desc_header": "Described"}, "zh": {"checkpoint_header": "other"}}\n'
    )
    return folder


def test_unigenbench_asks_in_the_official_words(tmp_path: Path) -> None:
    items = BENCHES["unigenbench"].read(unigenbench(tmp_path))
    assert items[0].metadata["request"] == (
        "a tall hat, {ink}|['Attribute - Size', 'Style']|Defined:「\nAttribute - Size: how large\nStyle: of art\n」|"
        "Described:「\nAttribute - Size: a tall hat\nStyle: in ink\n」"
    )
    lines = table("unigenbench", items, [{"vlm": [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]}])
    assert {key: line.value for key, line in lines.items()} == {
        ("Dimension", "Attribute"): 75.0,
        ("Part", "Attribute - Size"): 75.0,
        ("Dimension", "Style"): 25.0,
        ("Overall", "mean of the dimensions"): 50.0,
    }


def compbench(folder: Path) -> Path:
    for category in ("color", "shape", "texture", "spatial", "3d_spatial", "numeracy", "non_spatial"):
        (folder / f"{category}_val.txt").write_text(f"a {category} thing\nanother {category} thing")
    (folder / "complex_val.txt").write_text(
        "The red hat is on a box.\nA big dog runs.\nA bowl is near a cat that sleeps."
    )
    (folder / "complex_val_spatial.txt").write_text("the red hat is on a box\n")
    (folder / "complex_val_action.txt").write_text("A big dog runs. And more.\n")
    (folder / "numeracy_val.txt").write_text("two ships and a sheep\nfour traffic lights, one cup")
    (folder / "new_objects.txt").write_text("Cup - cups\nship - ships\nsheep - sheep\ntraffic light - traffic lights")
    return folder


def test_compbench_reads_what_a_prompt_counts(tmp_path: Path) -> None:
    items = [item for item in BENCHES["compbench"].read(compbench(tmp_path)) if "counts" in item.metadata]
    assert [(item.metadata["objects"], item.metadata["counts"]) for item in items] == [
        (["ship", "sheep"], [2, 1]),
        (["traffic light", "cup"], [4, 1]),
    ]
    (tmp_path / "new_objects.txt").write_text("cup - cups\nship, ships")
    with pytest.raises(UserError, match=r'new_objects.txt:2: expected "SINGULAR - PLURAL", got "ship, ships"'):
        BENCHES["compbench"].read(tmp_path)


def test_compbench_mixes_three_judges_for_complex_prompts(tmp_path: Path) -> None:
    items = [item for item in BENCHES["compbench"].read(compbench(tmp_path)) if item.metadata["category"] == "complex"]
    answers: list[Answers] = [{"blip_vqa": [[0.9]], "unidet_2d": [[0.6]], "clip_plain": [[0.3]]}] * 3
    values = [next(iter(BENCHES["compbench"].marks(item, answers[0])))[2] for item in items]
    assert values == pytest.approx([(0.6 + 0.9) / 2, (0.3 + 0.9) / 2, (0.9 + 0.6 + 0.3) / 3])
    assert table("compbench", items, answers)["Category", "complex"].value == pytest.approx(fmean(values))


# standard errors


def test_errors_are_over_prompts_and_differences_are_paired() -> None:
    dice = np.random.default_rng(0)
    hard = dice.normal(size=40)
    base, better = hard + 0.01 * dice.normal(size=40), hard + 0.1 + 0.01 * dice.normal(size=40)
    lines = [lines_of([[("s", "l", v), ("s", "l", v)] for v in values.tolist()], {}) for values in (base, better)]
    line = lines[0]["s", "l"]
    assert line.error == pytest.approx(stdev(base.tolist()) / 40**0.5) and line.count == 80 and line.prompts == 40
    gap = change(line, lines[1]["s", "l"])
    assert gap.value == pytest.approx(fmean(better - base)) and gap.sure
    assert gap.error == pytest.approx(stdev((better - base).tolist()) / 40**0.5)
    assert lines_of([[("s", "l", 1.0)]], {})["s", "l"].error is None
    unequal = [[("s", "l", float(v))] * n for v, n in zip(dice.normal(size=400), dice.integers(1, 6, 400), strict=True)]
    picks = dice.integers(0, 400, (800, 400))
    boot = [fmean(v for i in row for _, _, v in unequal[i]) for row in picks[:, :]]
    assert lines_of(unequal, {})["s", "l"].error == pytest.approx(float(np.std(boot)), rel=0.1)


# files


def test_the_table_and_the_command_have_the_same_names() -> None:
    assert tuple(BENCHES) == NAMES


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("geneval2", lambda d: d.rmdir(), 'is not a folder; name your copy of the official files'),
        ("geneval2", lambda d: (d / "geneval2_dat.jsonl").touch(), 'no geneval2_data.jsonl (nearest: "geneval2_dat.'),
        ("geneval2", lambda d: (d / "geneval2_data.jsonl").write_text('{"prompt": "", "atom_count": 3}'), '"vqa_list"'),
        ("geneval2", lambda d: (d / "geneval2_data.jsonl").write_text("{"), "geneval2_data.jsonl:1: not valid JSON"),
        ("parti", lambda d: written(d / "PartiPrompts.tsv", [["Prompts", "Category", "Challenge"]], "\t"),
         'no column "Prompt" (nearest: "Prompts"); it has: Prompts, Category, Challenge'),
        ("drawbench", lambda d: written(d / "drawbench.csv", [["Prompts", "Category"], ["alone"]]), "fewer fields"),
        ("drawbench", lambda d: (d / "drawbench.csv").write_text('Prompts,Category\n"a,b\nc,d\n'), "csv:2: a quote is"),
        ("dpg", lambda d: written(d / "dpg_bench.csv", [["item_id", "text"]]), 'no column "proposition_id"'),
        ("unigenbench", lambda d: unigenbench(d, "Attribute - Sze"), 'unknown test point "Attribute - Sze" (nearest: '),
        ("compbench", lambda d: (d / "x").touch(), "has no examples/dataset/complex_val_spatial.txt or "),
    ],
)  # fmt: skip
def test_other_files_are_told_in_one_line(name: str, make: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "data"
    data.mkdir()
    make(data)
    judge = [] if BENCHES[name].judges else ["--judge", "jpeg"]
    given = ["--model", "playground", "--data", str(data), "--out", str(tmp_path / "out"), *judge]
    assert main(["bench", name, *given]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said and said.startswith("diffrl: error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["genevl"], 'unknown benchmark "genevl" (nearest: "geneval")'),
        ([], "name a benchmark (choose from: compbench"),
        (["geneval2"], "--model is missing"),
        (["geneval2", "--model", "playground"], "--data is missing: your copy of github.com/facebookresearch/GenEval2"),
        (["parti", "--model", "playground", "--data", ".", "--out", "o"], "name at least one reward"),
        (["compbench", "--model", "playground", "--data", ".", "--out", "o", "--judge", "jpeg"], "Write blip_vqa=jpeg"),
        (["geneval2", "--model", "playground", "--data", ".", "--out", "o", "clip.x=1"], '"clip" is not one of'),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_and_list_fit_80_columns(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["--help"], ["--list"]):
        assert main(["bench", *words]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


# from pictures to answers


def pictures(folder: Path, items: list[Item], sizes: list[tuple[int, int]]) -> list[Shot]:
    folder.mkdir(parents=True, exist_ok=True)
    shots = []
    for i, (item, size) in enumerate(zip(items, sizes, strict=True)):
        Image.new("RGB", size, (20 * i, 20 * i, 20 * i)).save(folder / f"{i:05d}-00.png")
        shots.append(Shot(item, folder / f"{i:05d}-00.png"))
    return shots


class Bright:
    name = "bright"

    def __call__(self, images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return images.mean(dim=(1, 2, 3))


def test_processes_share_the_pictures_and_torn_lines_are_asked_again(tmp_path: Path) -> None:
    shots = pictures(tmp_path / "images", [Item(f"p{i}") for i in range(7)], [(8, 8), (8, 16)] * 3 + [(8, 8)])
    for rank in range(2):
        judge_all("bright", Bright(), shots, tmp_path, rank, 2)
    known = read_answers(tmp_path, "bright")
    assert {name: values[0] for name, values in known.items()} == pytest.approx(
        {f"{i:05d}-00.png": 20 * i / 255 for i in range(7)}, abs=1e-6
    )
    path = tmp_path / "answers" / "bright-0.jsonl"
    path.write_text(path.read_text()[:-9])  # as a kill leaves it
    assert len(read_answers(tmp_path, "bright")) == 6
    judge_all("bright", Bright(), [shots[6]], tmp_path, 0, 1)
    assert read_answers(tmp_path, "bright") == known


def test_answers_are_checked(tmp_path: Path) -> None:
    shots = pictures(tmp_path / "images", [Item("p", {}, {"vlm": 2})], [(8, 8)])

    class Few(Bright):
        def answers(self, images: Any, prompts: Any, metadata: Any) -> list[list[float]]:
            return [[0.5] for _ in images]

    with pytest.raises(UserError, match="needs a method answers"):
        judge_all("vlm", Bright(), shots, tmp_path, 0, 1)
    with pytest.raises(RewardError, match='answered the prompt "p" with other than 2 finite numbers'):
        judge_all("vlm", Few(), shots, tmp_path, 0, 1)
    shots[0].path.write_bytes(b"no picture")
    with pytest.raises(UserError, match="not a readable picture"):
        judge_all("vlm", Few(), shots, tmp_path, 0, 1)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffrl.policy import LoraSpec, load_policy

    policy = load_policy("playground", lora=LoraSpec(rank=4, alpha=8), precision="fp32", device="cpu")
    generator = torch.Generator().manual_seed(1)
    state = {k: 0.1 * torch.randn(v.shape, generator=generator) for k, v in policy.state("default").items()}
    policy.load_state("default", state)
    policy.save_lora(folder := tmp_path_factory.mktemp("lora"))
    return folder


FOLDERS = {
    "geneval": lambda d: (d / "evaluation_metadata.jsonl").write_text(
        json.dumps({"tag": "a", "include": [{"class": "dog", "count": 1}], "prompt": "a photo of a dog"})
    ),
    "geneval2": geneval2,
    "dpg": lambda d: graph(d, random.Random(3)),
    "compbench": compbench,
    "unigenbench": unigenbench,
    "drawbench": lambda d: written(d / "drawbench.csv", [["Prompts", "Category"], ["a red cup", "Colors"]]),
    "parti": lambda d: written(
        d / "PartiPrompts.tsv", [["Prompt", "Category", "Challenge"], ["a red cup", "World", "Basic"]], "\t"
    ),
}
TINY = """
import torch
class Tiny:
    name = "tiny"
    def answers(self, images, prompts, metadata):
        torch.manual_seed(0)
        net = torch.nn.Conv2d(3, 16, 5).requires_grad_(False)
        values = net(images).mean(dim=(2, 3)).sigmoid().tolist()
        return [row[:len(data.get("vqa_list") or data.get("points") or [0])] for row, data in zip(values, metadata)]
    def __call__(self, images, prompts, metadata):
        return torch.tensor([row[0] for row in self.answers(images, prompts, metadata)])
class Nonsense(Tiny):
    def answers(self, images, prompts, metadata):
        return [[float("nan")] * 99 for _ in images]
"""


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_runs_on_the_playground(name: str, tmp_path: Path, capsys: Any) -> None:
    """A tiny random judge, asked again about the pictures on the disk; then nonsense, and a file that is not there."""
    (tmp_path / "judge.py").write_text(TINY)
    (tmp_path / "data").mkdir()
    data, bench = tmp_path / "data", BENCHES[name]
    FOLDERS[name](data)
    words = ["bench", name, "--model", "playground", "--data", str(data), "--steps", "2", "--per-prompt", "1"]
    ask = [f"{judge}={tmp_path}/judge.py:Tiny" for judge in bench.judges] or [f"{tmp_path}/judge.py:Tiny"]
    out = tmp_path / "out"
    assert main([*words, "--limit", "2", "--out", str(out), "--judge", ",".join(ask)]) == 0
    said = capsys.readouterr().out
    result = json.loads((out / "bench.json").read_text())
    items, (tiny,) = bench.read(data)[:2], [load_reward(f"{tmp_path}/judge.py:Tiny")]
    answers: list[Answers] = []
    for item, path in zip(items, sorted(out.rglob("*.png")), strict=True):
        image = torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1)[None].float() / 255
        values = tiny.answers(image, [item.text], [dict(item.metadata)])
        answers.append(dict.fromkeys(item.owed or ["Tiny"], values))
    for (section, line), expected in table(name, items, answers).items():
        assert result["results"][section][line]["base"]["value"] == pytest.approx(expected.value, rel=1e-6)
    whole = len(bench.read(data)) > 2
    assert ("whole" in result) == whole == ("all prompts at this call's pace, loading included: drawing" in said)
    nonsense = [one.replace("Tiny", "Nonsense") for one in ask]
    assert main([*words, "--limit", "2", "--out", str(tmp_path / "bad"), "--judge", ",".join(nonsense)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("diffrl: error: --judge: ") and "finite" in error
    next(data.rglob("*.*")).unlink()
    assert main([*words, "--out", str(tmp_path / "none"), "--judge", ",".join(ask)]) == 2
    assert "--data: " in capsys.readouterr().err.strip().splitlines()[-1] and not (tmp_path / "none").exists()


def test_a_judges_package_is_asked_for_before_drawing(tmp_path: Path, capsys: Any) -> None:
    graph(tmp_path, random.Random(3))
    words = ["bench", "dpg", "--model", "playground", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*words, "--judge", "mplug"]) == 2
    error = capsys.readouterr().err
    assert "mplug: it comes with modelscope (" in error and "pip install 'modelscope[multi-modal]'" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("status", [None, 401, 404])
def test_a_judge_that_is_not_there_is_known_before_a_picture_is_drawn(
    tmp_path: Path, capsys: Any, status: int | None
) -> None:
    """Nobody listens; another key; a model that it does not have."""
    judge = SlowJudge()
    if status is None:
        judge.stop()
    judge.faults = [status or 0] * 9
    data, out = geneval2(tmp_path / "data"), tmp_path / "out"
    words = ["bench", "geneval2", "--model", "playground", "--data", str(data), "--out", str(out), "--steps", "2"]
    try:
        assert main([*words, "--judge", "vlm", f"vlm.server={judge.url}", "vlm.model=judge"]) == 2
    finally:
        if judge.there:
            judge.stop()
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("diffrl: error: ") and judge.url in error and not list(out.rglob("*.png"))


@pytest.mark.long
def test_the_list_counts_the_drawing_of_a_model(capsys: Any) -> None:
    """Of the playground, against its operations by doctor's count."""
    from diffrl.config import load_config
    from diffrl.memory.fit import Estimator

    assert main(["bench", "--list", "--model", "playground", "--steps", "7"]) == 0
    text = capsys.readouterr().out.split("drawbench: ")[1].split("draw  ")[1]
    estimator = Estimator(load_config("playground/nft", ["rollout.batch_size=32", "rollout.guidance_scale=1"]))
    done = estimator.fit().operations
    sampling, decoding = (next(v for k, v in done.items() if k.startswith(word)) for word in ("sampling", "decoding"))
    assert float(text.split()[0]) * 1e15 == pytest.approx(
        200 * (7 * sampling / 32 + decoding / estimator.phases.chunk), rel=0.02
    )
    assert "at 200 TFLOP/s (counted; 7 steps" in " ".join(text.split())


def test_a_bench_on_the_playground(tmp_path: Path, lora: Path, capsys: Any) -> None:
    """Base and LoRA from the same noise, by a judge of questions; a stop in the middle, and on from there."""
    (tmp_path / "judge.py").write_text(JUDGE)
    data, out = geneval2(tmp_path / "data"), tmp_path / "out"
    words = ["bench", "geneval2", "--model", "playground", "--data", str(data), "--out", str(out), "--steps", "2"]
    words += ["--per-prompt", "2"]
    assert main([*words, "--judge", f"{tmp_path}/judge.py:Nonsense"]) == 2
    assert '"vlm" failed on the prompt "two red cups" with ValueError' in capsys.readouterr().err
    judge = ["--judge", f"{tmp_path}/judge.py:Seven"]
    (tmp_path / "asked").unlink(missing_ok=True)
    (tmp_path / "fail").touch()
    assert main([*words, *judge]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("diffrl: error: --judge: ") and "no more today" in error
    drawn = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("*.png"))}
    assert len(drawn) == 4
    (tmp_path / "fail").unlink()
    (tmp_path / "asked").unlink()
    assert main([*words, *judge, "--lora", str(lora)]) == 0
    said = capsys.readouterr().out
    assert "Soft-TIFA" in said and "change" in said and "report.html" in said
    assert all(path.stat().st_mtime_ns == before for path, before in drawn.items())  # kept
    assert len((tmp_path / "asked").read_text()) == 8  # base and LoRA, each picture once
    result = json.loads((out / "bench.json").read_text())
    lights = {
        m: [float(np.asarray(Image.open(p)).mean()) / 255 for p in sorted((out / m).rglob("*.png"))]
        for m in ("base", "lora")
    }
    shares = (fmean([1, 1 / 2]), fmean([1, 1 / 2, 1 / 3]))
    for model, values in lights.items():
        expected = 100 * fmean(light * shares[i // 2] for i, light in enumerate(values))
        assert result["results"]["Soft-TIFA"]["AM (parts)"][model]["value"] == pytest.approx(expected, rel=1e-5)
    assert result["left_out"] == [] and result["judges"]["vlm"]["reward"].endswith("judge.py:Seven")
    assert result["official"] == {"prompts": 800, "per_prompt": 1, "seed": 0} and lights["base"] != lights["lora"]
    page = (out / "report.html").read_text()
    assert "Not the official number" in page and "two red cups" in page
    (tmp_path / "asked").unlink()
    assert main([*words, *judge, "--lora", str(lora)]) == 0  # all is there: nobody is asked
    assert not (tmp_path / "asked").exists()
    assert main([*words, "--judge", f"{tmp_path}/judge.py:Nonsense"]) == 2
    assert "choose another folder, or delete its answers/vlm-*" in capsys.readouterr().err
