"""A reward can stop a run with one line that names it; it cannot poison what others score."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diffrl.additions.suspicion import EPOCHS, Suspicions
from diffrl.errors import UserError, in_one_line
from diffrl.prompts import Prompt
from diffrl.rewards import scoring
from diffrl.rewards.protocol import RewardError
from diffrl.rewards.registry import load_reward
from diffrl.rewards.scoring import Scorer

IMAGES = torch.linspace(0, 1, 4 * 3 * 4 * 4).view(4, 3, 4, 4)
PROMPTS = [Prompt(f"prompt {i}", {"tags": [i]}) for i in range(4)]


class Plain:
    """The mean of the pixels, or what `answer` makes of it; `before` may do what it likes."""

    name = "plain"

    def __init__(self, answer=lambda scores: scores, before=lambda images, prompts, metadata: None, **attributes):
        self.answer, self.before = answer, before
        vars(self).update(attributes)

    def __call__(self, images: Tensor, prompts: Any, metadata: Any) -> Tensor:
        self.before(images, prompts, metadata)
        return self.answer(images.mean((1, 2, 3)))


def through_numpy(images: Tensor, prompts: list[str], metadata: list[dict]) -> None:
    images.numpy()[:] = 0.0  # torch counts no change
    prompts[0] = "another"
    metadata[0]["tags"].append("mine")


def test_a_reward_that_writes_into_its_images_harms_nobody_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(scoring.log, "warning", lambda text, *words: told.append(text % words))
    images = IMAGES.clone()
    seen: list[tuple[list[str], list[dict]]] = []

    def look(images: Tensor, prompts: list[str], metadata: list[dict]) -> None:
        seen.append((list(prompts), [dict(m) for m in metadata]))

    last = Plain(before=look)
    scorer = Scorer({"writes": Plain(before=through_numpy), "last": last})
    scores = torch.cat([scorer.score(images, PROMPTS) for _ in range(2)])
    torch.testing.assert_close(scores[:, 1], IMAGES.mean((1, 2, 3)).repeat(2))
    assert torch.equal(images, IMAGES) and all(prompt.metadata == {"tags": [i]} for i, prompt in enumerate(PROMPTS))
    assert seen[0] == ([p.text for p in PROMPTS], [{"tags": [i]} for i in range(4)])
    assert [text.split(";")[0] for text in told] == ['reward "writes" writes into the images that it is given']


def test_the_memory_of_images_knows_their_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rewards of one batch share what is seen; a write through NumPy, which torch does not count, ends that."""
    from diffrl_playground import verifier

    calls = []
    look = verifier.views

    def counted(pixels: Any) -> Any:
        calls.extend(int(image[0, 0, 0]) for image in pixels)
        return look(pixels)

    monkeypatch.setattr(verifier, "views", counted)
    images, prompts = torch.full((1, 3, 64, 64), 0.2), ["a heart"]
    for batch in (images, images.clone()):
        verifier.verify(batch, prompts)
    images.numpy()[:] = 0.4
    verifier.verify(images, prompts)
    with torch.inference_mode():
        verifier.verify(images + 0.2, prompts)
    assert calls == [51, 102, 153]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda scores: scores > 0.5, "returned booleans; return scores.float()"),
        (lambda scores: scores.to(torch.complex64), "returned complex numbers"),
        (lambda scores: scores * 1e12, "a score may be at most 1e.09 in size"),
        (lambda scores: scores[:, None], r"returned the shape \(4, 1\)"),
        (lambda scores: sys.exit(3), "failed with SystemExit: 3"),
        (lambda scores: 1 / 0, "failed with ZeroDivisionError"),
    ],
)
def test_what_is_no_score_is_named(answer, said: str) -> None:
    with pytest.raises(RewardError, match=said) as caught:
        Scorer({"plain": Plain(answer)}).score(IMAGES, PROMPTS)
    assert 'reward "plain"' in str(caught.value) and "\n" not in str(caught.value)


def test_whole_numbers_and_half_precision_are_scores() -> None:
    for kind in (torch.int64, torch.float16, torch.float64):
        scores = Scorer({"plain": Plain(lambda scores, kind=kind: (scores * 4).to(kind))}).score(IMAGES, PROMPTS)
        assert scores.dtype == torch.float32 and scores.isfinite().all()


def test_an_array_of_any_layout_is_read_without_a_warning_and_what_it_masks_is_no_score(recwarn: Any) -> None:
    """JAX gives read-only arrays, FITS files the other order of bytes; what a masked array hides is absent."""
    plain = Scorer({"plain": Plain()}).score(IMAGES, PROMPTS)
    frozen = plain[:, 0].numpy().copy()
    frozen.setflags(write=False)
    for array in (frozen, frozen.astype(">f4"), frozen.astype(np.longdouble), frozen[::-1].copy()[::-1]):
        assert torch.equal(Scorer({"plain": Plain(lambda _, array=array: array)}).score(IMAGES, PROMPTS), plain)
    masked = np.ma.masked_array([1e12, 2.0, 3.0, 4.0], mask=[True, False, False, False])
    scores = Scorer({"plain": Plain(lambda _: masked)}, unscored={"plain": 1.0}).score(IMAGES, PROMPTS)
    assert scores[:, 0].nan_to_num(-1).tolist() == [-1, 2, 3, 4] and not recwarn.list


def test_an_applies_that_raises_and_a_device_that_is_none() -> None:
    def applies(prompt: str, metadata: dict) -> bool:
        raise KeyError("tag")

    with pytest.raises(RewardError, match=r'reward "plain" failed on the prompt "prompt 0" with KeyError'):
        Scorer({"plain": Plain(applies=applies)}).score(IMAGES, PROMPTS)
    for device in ("cudaa", 3.5, torch.float16):  # the last two would be taken for types of numbers
        with pytest.raises(RewardError, match=rf"its device, {device!r}, cannot be used"):
            Scorer({"plain": Plain(device=device)}).score(IMAGES, PROMPTS)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised


def test_an_exception_without_a_message_has_its_place_once() -> None:
    place = r"\(test_hostile_rewards\.py:\d+\)"
    assert in_one_line(ValueError()) == "ValueError"  # it was not raised
    assert re.fullmatch(rf"ValueError {place}", in_one_line(_raised(ValueError())))
    assert re.fullmatch(rf"ValueError {place}", in_one_line(_raised(ValueError(" \n")), place=True))
    assert in_one_line(_raised(ValueError("a: b"))) == "ValueError: a: b"
    assert re.fullmatch(rf"ValueError: a {place}", in_one_line(_raised(ValueError("a")), place=True))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unspeakable(), r"failed with Unspeakable: \(its message cannot be shown\); try"),
        (KeyboardInterrupt(), r"failed with KeyboardInterrupt \(test_hostile_rewards.py:\d+\); try"),
        (ValueError(), r"failed with ValueError \(test_hostile_rewards.py:\d+\); try"),
        (ValueError("a\nb" + "x" * 9999), r"failed with ValueError: a bx{497} \.\.\.; try"),
    ],
)
def test_an_exception_is_one_line_whatever_its_message(error: BaseException, said: str) -> None:
    def fail(images: Tensor, prompts: list[str], metadata: list[dict]) -> None:
        raise error

    with pytest.raises(RewardError, match=said):
        Scorer({"plain": Plain(before=fail)}).score(IMAGES, PROMPTS)


def test_what_a_reward_changes_of_the_process_is_put_back(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(scoring.log, "warning", lambda text, *words: told.append(text % words))
    monkeypatch.chdir(tmp_path)

    def change(images: Tensor, prompts: list[str], metadata: list[dict]) -> None:
        torch.set_default_dtype(torch.float64)
        os.chdir("/")

    scorer = Scorer({"plain": Plain(before=change)})
    assert torch.equal(scorer.score(IMAGES, PROMPTS), scorer.score(IMAGES, PROMPTS))
    assert torch.get_default_dtype() == torch.float32 and os.getcwd() == str(tmp_path)
    assert told == [
        f'reward "plain" changes {what}; it was put back' for what in ("torch's default dtype", "the working folder")
    ]


@pytest.mark.parametrize(("how", "code"), [("comes back", 0), ("raises", 0), ("exits", 7)])
def test_a_fork_that_comes_back_from_a_reward_ends_there(how: str, code: int) -> None:
    children: list[int] = []

    def fork(images: Tensor, prompts: list[str], metadata: list[dict]) -> None:
        if (child := os.fork()) != 0:
            children.append(child)
        elif how == "raises":
            raise SystemExit
        elif how == "exits":
            os._exit(code)

    assert Scorer({"plain": Plain(before=fork)}).score(IMAGES, PROMPTS).isfinite().all()
    for child in children:
        end = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.05)
        assert (ended[0], os.waitstatus_to_exitcode(ended[1])) == (child, code), "it waits for ever"


def test_an_exit_in_a_constructor_or_a_file_is_one_line(tmp_path) -> None:
    file = tmp_path / "leaves.py"
    file.write_text(
        "import sys\nclass Leaves:\n    def __init__(self): sys.exit('bye')\n    def __call__(self, i, p, m): ...\n"
    )
    with pytest.raises(UserError, match="could not be built: SystemExit: bye"):
        load_reward(f"{file}:Leaves")
    file.write_text("raise SystemExit(4)\n")
    with pytest.raises(UserError, match="cannot be imported: SystemExit: 4"):
        load_reward(f"{file}:Leaves")


def test_a_reward_that_hangs_is_left_behind_by_its_limit_and_by_a_signal() -> None:
    gate = threading.Event()

    def hang(images: Tensor, prompts: list[str], metadata: list[dict]) -> None:
        gate.wait(20)

    with pytest.raises(RewardError, match=r"took longer than 0.2 s; raise the time limit \(rewards.plain.timeout"):
        Scorer({"plain": Plain(before=hang)}, timeout=0.2).score(IMAGES, PROMPTS)
    scorer, calls = Scorer({"plain": Plain(before=hang)}, retries=3), []

    def check() -> None:
        calls.append(0)
        if len(calls) > 1:
            raise InterruptedError("asked to end")

    scorer.check = check
    with pytest.raises(InterruptedError):  # neither tried again nor called a failure of the reward
        scorer.score(IMAGES, PROMPTS)
    gate.set()
    scorer.check = lambda: None
    assert scorer.score(IMAGES, PROMPTS).isfinite().all()  # in a new thread


FAILING = """
import numpy as np, os, torch
class Base:
    name = "mine"
    def __call__(self, images, prompts, metadata): return self.answer(images)
class Scalar(Base):
    def answer(self, images): return images.mean()
class Listed(Base):
    def answer(self, images): return [0.0] * len(images)
class Nothing(Base):
    def answer(self, images): pass
class Numpy(Base):
    def answer(self, images): return np.zeros(len(images))
class Raises(Base):
    def answer(self, images): raise ValueError(f"of {tuple(images.shape)}")
class Writes(Base):
    def answer(self, images): return images.mul_(0).mean((1, 2, 3))
class Leaves(Base): applies = lambda *_: os._exit(0)
class Fine(Base):
    def answer(self, images): return torch.rand(len(images))
"""


def test_who_did_not_write_in_the_first_phase_is_trusted_with_the_images_themselves() -> None:
    images, places = IMAGES.clone(), {"reads": set(), "writes": set()}  # type: ignore[var-annotated]

    def reads(images: Tensor, prompts: list[str], metadata: list[dict]) -> None:
        places["reads"].add(images.data_ptr())

    def writes(images: Tensor, prompts: list[str], metadata: list[dict]) -> None:
        places["writes"].add(images.data_ptr())
        through_numpy(images, prompts, metadata)

    scorer = Scorer({"reads": Plain(before=reads), "writes": Plain(before=writes)})
    for _ in range(2):
        assert images.data_ptr() not in places["reads"]
        scores = scorer.submit(images, PROMPTS).result()
        scorer.finish(scores, [images], PROMPTS, torch.arange(len(images)))
    assert images.data_ptr() in places["reads"] and images.data_ptr() not in places["writes"]
    assert torch.equal(images, IMAGES)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Scalar", "returned the shape () instead of (2,)"),
        ("Listed", ""),
        ("Nothing", "returned a NoneType"),
        ("Numpy", ""),
        ("Raises", "failed with ValueError: of (2, 3, 64, 64)"),
        ("Writes", "it writes into the images that it is given"),
        ("Leaves", 'applies() of reward "mine" failed on the prompt'),
        ("Fine", ""),
    ],
)
def test_a_file_s_reward_is_asked_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, name, said) -> None:
    from diffrl.cli.main import main
    from diffrl.run import setup

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FAILING)
    monkeypatch.setattr(setup, "load_policy", lambda *args, **given: (_ for _ in ()).throw(UserError("loading")))
    assert main(["train", "playground/nft", f"rewards.mine.plugin=mine.py:{name}", "--dry-run"]) == 2
    error = capsys.readouterr().err
    if not said:
        assert error.strip() == "diffrl: error: loading"
        return
    assert said in error and error.count("diffrl: error: rewards.mine: ") == 1
    if name not in ("Writes", "Leaves"):
        assert 'on two random images of 64 x 64 pixels, reward "mine"' in error
        assert f"diffrl rewards check mine.py:{name}" in error


def test_rewards_are_suspected_of_what_they_do() -> None:
    suspicions = Suspicions(["flat", "fine"], memory=8 * 2**30)
    said = []
    for epoch in range(1, EPOCHS + 3):
        metrics = {"epoch": epoch, "reward/flat": 0.5, "reward/flat/std": 0.0 if epoch != 3 else 0.1}
        metrics |= {"reward/fine": 0.5, "reward/fine/std": 0.1}
        said.append(suspicions.after(metrics, {"flat": 0, "fine": 20 * 2**20, "watched": 2**23}))
    flat = [epoch for epoch, texts in enumerate(said, start=1) for text in texts if '"flat" gave all images' in text]
    assert flat == [1, 4]  # each time that it begins
    leaks = [
        epoch
        for epoch, texts in enumerate(said, start=1)
        for text in texts
        if "grew by 20 MiB an epoch over the last 10, 2% of" in text
    ]
    assert leaks == [EPOCHS] == [10], "small growth, and a few epochs of it, are the allocator's"
    assert not any("watched" in text for texts in said for text in texts)


def test_growth_is_counted_by_reward() -> None:
    kept: list[Tensor] = []
    keeps = Plain(before=lambda images, prompts, metadata: kept.append(torch.ones(16 * 2**20)))  # always new pages
    scorer = Scorer({"keeps": keeps, "plain": Plain()})
    scorer.score(IMAGES, PROMPTS)
    growth = scorer.take_growth()
    assert growth["keeps"] > 48 * 2**20 > growth["plain"]
    assert scorer.take_growth() == {"keeps": 0, "plain": 0}
    scorer.score(IMAGES, PROMPTS)
    kept.clear()
    assert scorer.take_growth()["keeps"] < 16 * 2**20, "what is given back after the call was not kept"


def test_doctor_survives_a_constructor_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does whatever loads a reward or a model afterwards."""
    from diffrl.cli import doctor
    from diffrl.rewards import registry

    woken = threading.Event()

    class Hangs:
        name = "hangs"

        def __init__(self) -> None:
            woken.wait()

        def __call__(self, images, prompts, metadata): ...

    class Later(Plain):
        def __init__(self) -> None:
            pass

    monkeypatch.setattr(doctor, "PATIENCE", 0.2)
    monkeypatch.setattr(registry, "available", lambda: {"hangs": None, "later": None})
    monkeypatch.setattr(registry, "load_class", {"hangs": Hangs, "later": Later}.__getitem__)
    found = list(doctor.rewards())
    assert found == [
        ("warn", "reward hangs", "TimeoutError: its constructor did not come back within 0.2 s"),
        ("ok", "reward later", "loads"),
    ]
    woken.set()
    assert isinstance(registry.load_reward("later"), Later)


def test_scores_that_hardly_differ_are_said_once() -> None:
    suspicions = Suspicions(["tiny", "fine"])
    fine = {"reward/fine": 0.5, "reward/fine/std": 0.01}
    narrow = {"epoch": 1, "reward/tiny": 1e-5, "reward/tiny/std": 2e-6, **fine}
    (said,) = suspicions.after(narrow, {})
    assert 'reward "tiny" differs by only 2.0e-06' in said and "scale its scores up" in said
    assert suspicions.after({**narrow, "epoch": 2}, {}) == []
    assert suspicions.after({**narrow, "epoch": 3, "reward/tiny/std": 2e-3}, {}) == []
    assert len(suspicions.after({**narrow, "epoch": 4}, {})) == 1
    assert Suspicions(["tiny", "fine"], shaped=["tiny"]).after(narrow, {}) == []


def test_a_training_that_computes_otherwise_than_the_rollout_is_said() -> None:
    """Once, and again when it is twice as far; an epoch without on-policy rows has no value."""
    suspicions = Suspicions([])
    said = [
        bool(suspicions.after({"epoch": i, "rollout/mismatch": off}, {}))
        for i, off in enumerate((None, 1e-3, 0.02, 0.03, 0.05))
    ]
    assert said == [False, False, True, False, True]
