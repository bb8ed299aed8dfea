"""The Python interface: callables as rewards, configs in code, and the same errors as the command line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import diffrl
from diffrl.api import prepare
from diffrl.cli.main import main
from diffrl.config import check_plugin
from diffrl.config.overrides import merge
from diffrl.config.source import Source
from diffrl.drawing import Drawing
from diffrl.model import Model
from diffrl.prepare.handed_over import register
from diffrl.prepare.objects import of_object
from diffrl.prompts import load_prompts
from diffrl.rewards import load_reward, local
from diffrl.rewards.registry import declares, takes

SMALL = {
    "epochs": 1,
    "lora": {"rank": 2, "alpha": 4},
    "rollout": {"groups": 2, "group_size": 2, "steps": 2, "batch_size": 4},
    "optimise": {"batch_size": 4, "micro_batch": None, "learning_rate": 1e-3},
    "evaluate": {"every": 1, "prompts": 2, "per_prompt": 2},
    "tracking": {"samples": 1},
}
PROMPTS = {"train": ["red a", "red b", "blue c"], "test": ["red d", {"prompt": "blue e", "kind": "test"}]}


def redness(images):
    return images[:, 0].mean((1, 2))


class Brightness:
    name = "brightness"

    def __init__(self, gain: float = 1.0, device: str = "cpu") -> None:
        self.gain, self.device = gain, device

    def __call__(self, images, prompts, metadata):
        return self.gain * images.mean((1, 2, 3))


def test_a_function_of_this_program_is_trained(tiny_model: Path, tmp_path: Path, capsys) -> None:
    seen = []

    def blueness(images, prompts, metadata):
        seen.extend(metadata)
        return [float(image[2].mean()) for image in images]  # a list of numbers is fine

    run = diffrl.train(
        SMALL,
        "seed=3",
        model=tiny_model,  # a path is fine
        run_dir=tmp_path / "run",
        prompts=PROMPTS,
        rewards=[redness, Brightness],
        watch={"blueness": blueness, "light": {"plugin": Brightness(gain=2.0)}},
    )
    assert [row["epoch"] for row in run.metrics] == [0, 1]
    assert run.metrics[1]["reward/redness"] > 0 and run.metrics[1]["eval/blueness"] > 0
    assert run.config.seed == 3 and run.config.rewards["redness"].plugin == f"{Path(__file__).resolve()}:redness"
    assert {"kind": "test"} in seen and run.lora == tmp_path / "run/lora" and run.report.stat().st_size > 1000
    first = tmp_path / "first"
    first.mkdir()
    (first / "metrics.jsonl").write_text((run.folder / "metrics.jsonl").read_text().splitlines()[0] + "\n")
    assert diffrl.Run(first).gains() == {}, "one evaluation changes nothing"
    assert set(run.gains()) == {"redness", "brightness", "blueness", "light", "diversity", "saturation"}
    # What no other program can import is not part of the folder: it must be given again.
    local.forget("python:blueness")
    assert main(["train", "--resume", str(run.folder), "epochs=2"]) == 2
    assert '"python:blueness" is an object of the program that used it' in capsys.readouterr().err
    register("blueness", blueness)
    on = diffrl.train(resume=run.folder, epochs=2)
    assert [row["epoch"] for row in on.metrics] == [0, 1, 2]
    assert diffrl.Run(run.folder).metrics == on.metrics
    assert on.show() is None and str(run.report.resolve()) in capsys.readouterr().out


def test_loaded_models_draw_and_are_scored(tiny_model: Path, tmp_path: Path) -> None:
    model = diffrl.load(tiny_model)
    images = model.draw(["red a", "blue b"], seed=1, steps=2, per_prompt=2)
    assert len(images) == 4 and images[0].size == (16, 16)
    again = diffrl.load(tiny_model).draw(["red a"], seed=1, steps=2)
    assert list(again[0].getdata()) == list(images[0].getdata())
    scores = diffrl.evaluate(model, [redness], ["red a", "blue b"], steps=2, per_prompt=2, out=tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["mean"] == scores["mean"]
    drawn = torch.stack(
        [
            torch.tensor(list(i.getdata())).float()[:, 0].mean() / 255
            for i in model.draw(["red a", "blue b"], steps=2, per_prompt=2)
        ]
    )
    assert scores["mean"]["redness"] == pytest.approx(float(drawn.mean()), abs=2e-3)  # 8 bits
    twice = diffrl.evaluate(model, {"b": {"plugin": Brightness, "gain": 2.0}, "a": Brightness}, ["red a"], steps=2)
    assert twice["mean"]["b"] == pytest.approx(2 * twice["mean"]["a"], rel=1e-6)


@contextlib.contextmanager
def a_notebook_s_switches() -> Iterator[None]:
    """Gradients off, autocast on, float64 and another device by default."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            yield
            assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
            assert torch.get_default_dtype() == torch.float64 and torch.get_default_device().type == "meta"
            assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_notebook_s_switches_change_nothing(tiny_model: Path, tmp_path: Path) -> None:
    found = []
    for name, switches in (("plain", contextlib.nullcontext()), ("switched", a_notebook_s_switches())):
        with switches:
            where = {"model": str(tiny_model), "run_dir": str(tmp_path / name)}
            run = diffrl.train(SMALL, prompts=PROMPTS, rewards={"redness": redness}, **where)
            model = diffrl.load(run)
            picture = model.draw("red a", seed=1, steps=2)[0].tobytes()
            found.append((picture, diffrl.evaluate(model, {"redness": redness}, ["red a"], steps=2)["scores"]))
        found[-1] += (load_file(run.lora / "pytorch_lora_weights.safetensors"),)
    (picture, scores, weights), (other, others, again) = found
    assert picture == other and scores == others
    assert weights.keys() == again.keys() and all(torch.equal(weights[key], again[key]) for key in weights)


def test_threads_may_load_at_once(tiny_model: Path) -> None:
    """As a page does that several people use; a model that is loaded afterwards works, too."""
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(diffrl.load, [tiny_model] * 4))
    pictures = {model.draw("red a", steps=1)[0].tobytes() for model in [*models, diffrl.load(tiny_model)]}
    assert len(pictures) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"seed": 1.5}, "seed: expected a whole number of 0 or more, got 1.5"),
        ({"steps": 0}, "steps: expected a whole number of 1 or more, got 0"),
        ({"per_prompt": "2"}, "per_prompt: expected a whole number of 1 or more, got '2'"),
    ],
)
def test_a_number_that_is_none_is_refused(words: dict[str, Any], expected: str) -> None:
    with pytest.raises(diffrl.UserError, match=expected):
        Drawing("playground", ["red a"], **words)


def test_abilities_and_forms_of_callables() -> None:
    def smooth(images, prompts):
        return images.mean((1, 2, 3))

    smooth.differentiable = True
    smooth.applies = lambda prompt, metadata: "red" in prompt
    register("smooth", smooth)
    register("plain", lambda images: images.mean((1, 2, 3)))
    register("made", Brightness(3.0))
    assert declares("python:smooth", "differentiable") and not declares("python:plain", "differentiable")
    reward = load_reward("python:smooth")
    assert reward.name == "smooth" and reward.applies("red", {}) and not reward.applies("blue", {})
    assert reward(torch.ones(2, 3, 2, 2), ["a", "b"], [{}, {}]).tolist() == [1, 1]
    assert load_reward("python:made").gain == 3.0 and not takes("python:made", "device")
    cls = register("cls", Brightness)
    assert cls.endswith("test_api.py:Brightness") and takes(cls, "device") and load_reward(cls, gain=4.0).gain == 4.0


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (3, 'reward "x": a int cannot be called'),
        (lambda: 0, "does not take (images), (images, prompts)"),
    ],
)
def test_what_is_no_reward_is_refused(thing, message) -> None:
    with pytest.raises(diffrl.UserError) as error:
        register("x", thing)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "values", "message"),
    [
        (["playground/demo"], {"epoch": 3}, 'argument: epoch: unknown key (nearest: "epochs")'),
        (["playground/dmo"], {}, 'no config "playground/dmo" (nearest: "playground/demo")'),
        (["playground/demo", "epochs"], {}, 'argument: "epochs": write section.key=value'),
        (
            ["playground/demo"],
            {"rewards": {"clp": "clp"}},
            'argument: rewards.clp: unknown reward "clp" (nearest: "clip")',
        ),
        (["playground/demo"], {"rewards": [redness, redness]}, '"redness" is given twice'),
        (["playground/demo"], {"rewards": [lambda images: images]}, '"<lambda>" is not a name for a reward'),
        (
            ["playground/demo"],
            {"rewards": {"a": 3}},
            "rewards.a: expected a callable, a plugin's name or a table, got a int",
        ),
        (["playground/demo"], {"prompts": ["a", "b"]}, "what is trained on is not held out"),
        (["playground/demo"], {"prompts": {"train": ["a", "a"], "test": ["b"]}}, 'prompts[1]: "a" comes twice'),
        ([], {}, "train: no CONFIG"),
        ([3], {}, 'config "3": cannot be read'),
        (["playground/demo", ["epochs=3"]], {}, 'argument: expected text such as "rollout.groups=16", got a list'),
        (["playground/demo"], {"rewards": 3}, "rewards: expected names and callables, got a int"),
        (["playground/demo"], {"prompts": {"train": {"a", "b"}, "test": ["c"]}}, "prompts.train: a Python set"),
        ([{"prompts": ["a", "b"]}], {}, "what is trained on is not held out"),
    ],
)
def test_bad_input_is_one_line(arguments, values, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = dict(values)
    with pytest.raises(diffrl.UserError) as error:
        prepare(arguments[0] if arguments else None, arguments[1:], rewards=values.pop("rewards", None), values=values)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_program_s_own_values_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of NumPy and torch, texts of an iterator or an array, and a whole table with prompts and callables."""
    monkeypatch.chdir(tmp_path)
    prompts = {"train": (text for text in ("a", "b")), "test": np.array(["c", "d"])}
    table = {"model": "playground", "prompts": prompts, "rewards": {"redness": redness}, "seed": np.int64(3)}
    rollout = {"groups": 2, "group_size": np.int64(6), "resolution": [np.int64(64), np.int64(32)]}
    table |= {"rollout": rollout, "optimise": {"batch_size": torch.tensor(12)}}
    rate = {"learning_rate": np.float64(0.5)}
    config, _ = prepare(table, ["run_dir=here"], values={"epochs": np.int32(2), "optimise": rate})
    assert (config.seed, config.epochs, config.optimise.learning_rate, config.optimise.batch_size) == (3, 2, 0.5, 12)
    assert config.rollout.resolution == (64, 32)
    assert all(type(value) is int for value in (config.seed, config.epochs, config.optimise.batch_size))
    assert [prompt.text for prompt in load_prompts(config.prompts.train)] == ["a", "b"]
    assert [prompt.text for prompt in load_prompts(config.prompts.test)] == ["c", "d"]
    assert load_reward(config.rewards["redness"].plugin)(torch.ones(1, 3, 2, 2), ["a"], [{}]).tolist() == [1]
    one, _ = prepare(table | {"prompts": PROMPTS}, ["prompts.train=here/prompts/train.jsonl", "run_dir=there"])
    assert one.prompts.train == "here/prompts/train.jsonl", "what is written behind a table changes it"
    drawing = Drawing("playground", ["red a"], seed=np.int64(3), steps=np.int32(2), guidance_scale=np.float32(2))
    sides = Drawing("playground", ["red a"], resolution=(np.int64(32), 64)).resolution
    assert sides == (32, 64) and all(type(side) is int for side in sides), "it is written as JSON after all is drawn"
    assert [type(value) for value in (drawing.seed, drawing.steps, drawing.guidance_scale)] == [int, int, float]


def test_a_program_s_own_values_are_read_inside_lists(tmp_path: Path) -> None:
    source = Source("config", {})
    inner = {"b": [torch.tensor(1), tmp_path]}
    merge(source, {"a": [np.int64(3), (np.float64(0.5), inner), [np.array([2])], "x", None]})
    plain = [3, [0.5, {"b": [1, str(tmp_path)]}], [[2]], "x", None]
    assert json.dumps(source.data["a"]) == json.dumps(plain), "Python's own, as JSON takes no other"


@pytest.mark.parametrize("config", [None, "playground/demo"])
def test_an_override_that_is_no_text_is_refused_before_a_run_is_fetched(config: Any, tmp_path: Path) -> None:
    with pytest.raises(diffrl.UserError, match=r'^argument: expected text such as "rollout.groups=16", got a int$'):
        prepare(config, [f"run_dir={tmp_path}/new", cast(str, 3)], resume="hub:me/run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"step": 2}, 'evaluate: unknown argument "step" (nearest: "steps")'),
        ({"out": "."}, 'out: "." is a folder; name a file'),
        ({"out": "/dev/null"}, 'out: "/dev/null" is a device; name a file'),
        ({"rewards": None}, "rewards: expected names and callables, got a NoneType"),
        ({"model": 3}, "model: expected a name, a folder or a run, got a int"),
        ({"model": Model("playground", cast(Any, None)), "lora": "x"}, "lora: the model is loaded already"),
        ({"resolution": "32x32"}, "resolution: expected pixels, or (width, height), got '32x32'"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_before_it_draws(words: dict[str, Any], message: str) -> None:
    with pytest.raises(diffrl.UserError) as error:
        diffrl.evaluate(**{"model": "playground", "rewards": "jpeg", "prompts": ["red a"]} | words)
    assert message in str(error.value)


def test_a_run_that_is_not_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(diffrl.UserError, match="no folder"):
        diffrl.load(diffrl.Run(tmp_path / "none"))


def test_what_is_optimised_is_no_longer_watched() -> None:
    config, resume = prepare("playground/demo", rewards=["clip"], values={"rollout": {"groups": 48}, "gardo": None})
    assert list(config.rewards) == ["clip"] and "clip" not in config.watch and "strict" in config.watch
    assert config.rollout.groups == 48 and config.rollout.steps == 6 and resume is None
    assert list(prepare("playground/demo", watch={})[0].watch) == []


def test_configs_are_built_in_code_and_read_back(tmp_path: Path) -> None:
    config = diffrl.Config(epochs=3, rewards={"clip": {"weight": 2.0}}, optimise={"betas": (0.9, 0.99)})
    diffrl.save_config(config, tmp_path / "mine.yaml")
    again = diffrl.load_config(tmp_path / "mine.yaml")
    assert again.model_copy(update={"run_dir": ""}) == config and isinstance(again, diffrl.Config)
    assert prepare(config, values={"epochs": 4})[0].epochs == 4
    with pytest.raises(diffrl.UserError, match=r'Config: rollout.group: unknown key \(nearest: "rollout.groups"\)'):
        diffrl.Config(rollout={"group": 3})


def test_another_program_must_give_the_objects_of_a_config() -> None:
    with pytest.raises(diffrl.UserError, match=r'"python:unheard" is an object of the program that used it; give it'):
        check_plugin("python:unheard")


@pytest.mark.long
def test_a_script_is_light_and_its_run_goes_on_from_the_shell(tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, diffrl\n"
        "assert 'script' not in sys.argv[0] or 'torch' not in sys.modules and 'train' in dir(diffrl)\n"
        "def red(images): return images[:, 0].mean((1, 2))\n"
        "if __name__ == '__main__':\n"
        f"    run = diffrl.train({SMALL!r}, model={str(tiny_model)!r}, run_dir='out', rewards=red,\n"
        f"                       prompts={PROMPTS!r})\n"
        "    print('epochs', [row['epoch'] for row in run.metrics])\n"
    )
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert "epochs [0, 1]" in done.stdout, done.stderr[-2000:]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "out", "epochs=2"]) == 0
    assert [row["epoch"] for row in diffrl.Run("out").metrics] == [0, 1, 2]


def test_what_other_programs_can_import_is_named_so(tmp_path: Path, monkeypatch) -> None:
    """A script that trains when it is imported is left alone; so is what is made inside of a function."""
    for guard, plugin in (("if __name__ == '__main__':\n    ", f"{tmp_path}/run.py:red"), ("", "python:red")):
        (tmp_path / "run.py").write_text(f"def red(images): return images\n{guard}train = '__main__'\n")
        program = types.ModuleType("__main__")
        program.__file__ = str(tmp_path / "run.py")
        exec((tmp_path / "run.py").read_text(), vars(program))
        monkeypatch.setitem(sys.modules, "__main__", program)
        assert register("red", program.red) == plugin
    assert register("inner", lambda images: images) == "python:inner"
    assert register("light", Brightness()) == "python:light"


def test_an_unknown_tracker_is_named() -> None:
    with pytest.raises(diffrl.UserError, match=r'tracking.trackers: unknown tracker "mlfow" \(nearest: "mlflow"\)'):
        prepare("playground/demo", values={"tracking": {"trackers": ["mlfow"]}})


def test_code_that_no_file_holds_is_told_apart() -> None:
    """What is typed at a prompt has no source; it can be trained, and another function is another reward."""
    texts = []
    for body in ("images.mean((1, 2, 3))", "2 * images.mean((1, 2, 3))", "images.mean((1, 2, 3))"):
        space: dict = {}
        exec(f"def typed(images): return {body}\nclass Typed:\n  def __call__(self, i, p, m): return {body}", space)
        pair = []
        for name in ("typed", "Typed"):
            pair.append(of_object(local.find(register(name, space[name]))))
        texts.append(pair)
    assert texts[0] == texts[2] and texts[0][0] != texts[1][0] and texts[0][1] != texts[1][1]
    assert all(text for pair in texts for text in pair)
