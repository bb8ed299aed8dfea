"""Rewards as people write them: functions and classes of some arguments, by name, from a file, a module, or Python."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diffrl.config import check_plugin
from diffrl.errors import UserError
from diffrl.prepare.handed_over import register
from diffrl.prepare.objects import of_object
from diffrl.prompts import Prompt
from diffrl.rewards import RewardError
from diffrl.rewards.local import find
from diffrl.rewards.registry import load_reward
from diffrl.rewards.scoring import Scorer
from diffrl.user_files import import_file

FILE = """
import asyncio
import functools
import sys
import typing

import numpy as np
import torch
from PIL import Image

Pictures = list[Image.Image]


def one(images):
    return images[:, 0].mean(dim=(1, 2))

def listed(images, prompts):
    return [float(image[0].mean()) for image in images]

def turned(prompts, images):
    return np.array([float(i[0].mean()) + 0 * len(p) for p, i in zip(prompts, images)])

def others(pixels, texts):
    return [float(p[0].mean()) + 0 * len(t) for p, t in zip(pixels, texts)]

def facts(metadata):
    return [one["red"] for one in metadata]

def pictures(images: list[Image.Image], *, power: float = 1.0):
    return [(np.asarray(image)[..., 0].mean() / 255) ** power for image in images]

class Plain:
    def __call__(self, images):
        return images[:, 0].mean(dim=(1, 2))

class Whole:
    def __init__(self, power: float = 1.0):
        self.power = power

    def __call__(self, images, prompts, metadata):
        return images[:, 0].mean(dim=(1, 2)) ** self.power

def mean(images):
    return images[:, 0].mean(dim=(1, 2))

def kw_only(*, prompts, images): return mean(images)
def kw_some(images, *, prompts): return mean(images)
def stars(*args): return mean(args[0])
def more(images, *args): return mean(images)
def names(**kwargs): return mean(kwargs["images"])
def trl_like(prompts, images, **kwargs): return mean(images)
def every(*args, **kwargs): return mean(args[0])
def defaults(images=None, prompts=None, metadata=None): return mean(images)
def by_position(images, /, prompts): return mean(images)
def singular(prompt, image): return mean(image)
def synonyms(texts, pixels): return mean(pixels)
def letters(i, p, m): return mean(i)
def power(images, p, power: float = 1.0): return mean(images) ** power
def first(gain, images): return gain * mean(images)
short = lambda images: mean(images)
part = functools.partial(first, 1.0)
part_kw = functools.partial(power, power=1.0)
async def later(images):
    await asyncio.sleep(0)
    return mean(images)
def one_by_one(images):
    for image in images:
        yield float(image[0].mean())
def mapped(images): return map(float, mean(images))
def scalars(images): return [image[0].mean() for image in images]
def rows(images): return tuple(np.float32(one) for one in mean(images))

def wrapping(function):
    @functools.wraps(function)
    def inner(*given, **more):
        return function(*given, **more)
    return inner

@wrapping
def decorated(prompts, images): return mean(images)
@torch.no_grad()
def no_grad(images, prompts): return mean(images)
@functools.lru_cache
def cached(images): return mean(images)

def red_of(pictures): return [np.asarray(one)[..., 0].mean() / 255 for one in pictures]
def text_of_type(images: "typing.Sequence[Image.Image]"): return red_of(images)
def alias(images: Pictures, prompts: list[str]): return red_of(images)
def alias_text(images: "Pictures"): return red_of(images)
def unknown_type(prompts: "Nowhere", images: "list[Image.Image]"): return red_of(images)
def array(images: np.ndarray): return np.mean(images, axis=(1, 2, 3)) * 3
def arrays(images: "list[np.ndarray]"): return [one[0].mean() for one in images]
def tensors(images: list[torch.Tensor]): return [one[0].mean() for one in images]
def either(images: "torch.Tensor | list[Image.Image]"): return mean(images)

class Bare:
    def __call__(self, images): return mean(images)
    def score(self, images, prompts): return mean(images)
    @staticmethod
    def static(images): return mean(images)
    @classmethod
    def of_class(cls, images): return mean(images)
bare = Bare()
method, static, of_class = bare.score, Bare.static, Bare.of_class
class Child(Bare): pass
class Names:
    def __call__(self, **given): return mean(given["images"])
class KeyOnly:
    def __call__(self, *, images, prompts): return mean(images)
class Later:
    name = "later"
    async def __call__(self, images, prompts, metadata): return mean(images)
class Module(torch.nn.Module):
    def forward(self, images): return mean(images)
module = Module()
class Static:
    @staticmethod
    def __call__(images): return mean(images)
class Equal:
    __hash__ = None
    def __call__(self, images: Pictures): return red_of(images)
equal = Equal()

def four(images, prompts, metadata, extra): return mean(images)
def nothing(): return []
def one_number(images): return 1.0
def plain_wrapper(function):
    def inner(*given): return function(*given)
    return inner
@plain_wrapper
def hidden(images): return mean(images)
class NoCall: pass
"""
RED = torch.zeros(2, 3, 4, 4)
RED[0, 0], RED[1, 0] = 0.2, 0.6
GIVEN = (RED, ["a", "bc"], [{"red": 0.2}, {"red": 0.6}])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "written_by_me.py").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize("form", ["written_by_me.py:{}", "written_by_me:{}"])
@pytest.mark.parametrize("name", ["one", "listed", "turned", "others", "facts", "pictures", "Plain", "Whole"])
def test_a_reward_takes_what_it_names(folder: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "written_by_me", raising=False)
    reward = load_reward(form.format(name))
    scores = torch.as_tensor(reward(*GIVEN)).float()
    assert scores.tolist() == pytest.approx([0.2, 0.6], abs=1e-6) and reward.name


@pytest.mark.parametrize("name", ["pictures", "Whole"])
def test_arguments_with_a_default_are_parameters(folder: Path, name: str) -> None:
    reward = load_reward(f"written_by_me.py:{name}", power=2.0)
    assert torch.as_tensor(reward(*GIVEN)).tolist() == pytest.approx([0.04, 0.36], abs=1e-6)
    with pytest.raises(UserError, match="powr"):
        load_reward(f"written_by_me.py:{name}", powr=2.0)


ODD = """kw_only kw_some stars more names trl_like every defaults by_position singular synonyms letters power short part
part_kw later one_by_one mapped scalars rows decorated no_grad cached text_of_type alias alias_text unknown_type array
arrays tensors either Bare bare method static of_class Child Names KeyOnly Later Module module Static Equal equal"""


@pytest.mark.parametrize("name", ODD.split())
def test_whatever_can_be_called_is_a_reward(folder: Path, name: str) -> None:
    """From a file, as a config names it, and from Python, where it is that object."""
    check_plugin(f"written_by_me.py:{name}")  # reads it, and runs nothing
    thing = getattr(import_file(folder / "written_by_me.py", "reward"), name)
    for plugin in (f"written_by_me.py:{name}", register(name, thing)):
        scorer = Scorer({name: load_reward(plugin)})
        scores = scorer.score(RED, [Prompt("a", GIVEN[2][0]), Prompt("bc", GIVEN[2][1])], torch.zeros(2).long())
        assert scores[:, 0].tolist() == pytest.approx([0.2, 0.6], abs=1e-6), plugin


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("four", 'the parameter "extra" is required'),
        ("first", 'the parameter "gain" is required'),
        ("nothing", "does not take (images)"),
        ("one_number", "returned a float instead of a tensor of shape (2,)"),
        ("hidden", "takes 1 positional argument"),
        ("NoCall", "the method __call__"),
        ("Pictures", "returned|list"),
    ],
)
def test_what_cannot_be_called_so_is_one_line(folder: Path, name: str, said: str) -> None:
    with pytest.raises((UserError, RewardError)) as error:
        reward = load_reward(f"written_by_me.py:{name}")
        Scorer({name: reward}).score(RED, [Prompt("a", {}), Prompt("b", {})], torch.zeros(2).long())
    assert any(one in str(error.value) for one in said.split("|")) and "\n" not in str(error.value)


def test_what_a_function_takes_besides_is_a_parameter(folder: Path) -> None:
    assert load_reward("written_by_me.py:first", gain=2.0)(*GIVEN).tolist() == pytest.approx([0.4, 1.2])
    assert load_reward("written_by_me.py:power", power=2.0)(*GIVEN).tolist() == pytest.approx([0.04, 0.36])


def test_python_functions_are_called_by_name_too() -> None:
    def turned(prompts, images):
        return [float(image[0].mean()) for image in images]

    assert torch.as_tensor(load_reward(register("turned", turned))(*GIVEN)).tolist() == pytest.approx([0.2, 0.6])


def reads_closure(value):
    return lambda images: images.mean((1, 2, 3)) * value


def reads_default(value):
    def scored(images, *, power=value):
        return images.mean((1, 2, 3)) ** power

    return scored


def reads_global(value):
    space = {"VALUE": value, "__name__": "typed"}
    exec("def helper(x): return x * VALUE\ndef scored(images): return helper(images.mean((1, 2, 3)))", space)
    return space["scored"]


class Held:
    def __init__(self, value):
        self.value = {"weights": [value]}

    def __call__(self, images):
        return images.mean((1, 2, 3))


class Net(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((2,), float(value), dtype=torch.bfloat16))

    def forward(self, images):
        return images.mean((1, 2, 3)) * self.w[0]


MAKERS = {
    "closure": reads_closure,
    "array": lambda value: reads_closure(np.full(3, value)),
    "default": reads_default,
    "global": reads_global,
    "partial": lambda value: functools.partial(reads_default(1.0), power=value),
    "object": Held,
    "method": lambda value: Held(value).__call__,
    "network": Net,
    "inner object": lambda value: reads_closure(Held(value)),
}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_a_cache_tells_objects_apart_by_what_they_read(kind: str) -> None:
    made = [register("held", MAKERS[kind](value)) and of_object(find("python:held"), whole=True) for value in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_what_an_object_counts_is_no_other_reward_for_a_resume() -> None:
    seen: list[int] = []
    register("seen", lambda images: seen.append(1) or images.mean((1, 2, 3)))
    before = of_object(find("python:seen"))
    seen.append(1)
    assert of_object(find("python:seen")) == before


def test_a_package_brings_a_form_in_which_rewards_are_written(
    installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Light:
        name = "light"

        def __call__(self, images, prompts, metadata):
            return images.mean((1, 2, 3))

    (tmp_path / "mine.py").write_text("which = 'light'\n")
    with pytest.raises(UserError, match="is not a reward"):
        load_reward(f"{tmp_path}/mine.py:which")
    form = SimpleNamespace(words=lambda thing, name: Light if thing == name.replace("which", "light") else thing)
    monkeypatch.setitem(sys.modules, "of_a_stranger", form)
    installed("words", "of_a_stranger:words", "diffrl.reward_forms")
    images = torch.rand(2, 3, 4, 4)
    assert torch.equal(load_reward(f"{tmp_path}/mine.py:which")(images, ["a", "b"], [{}, {}]), images.mean((1, 2, 3)))
