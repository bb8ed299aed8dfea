"""Mutated configs are read or refused in one line: a few of those of tests/stress/fuzz.py, which tries a thousand."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "stress"))

from fuzz import BASE, Mutation, mutation, text_of, verdict


def test_mutated_configs_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    """Of both kinds, accepted and refused, there are some."""
    seen = Counter[str]()

    @settings(max_examples=80, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def answered(data: st.DataObject) -> None:
        one = mutation(lambda options: data.draw(st.sampled_from(list(options))))
        kind, said = verdict(one, tmp_path)
        seen[kind] += 1
        assert kind != "FAILED", f"{said}\n{one.words}\n{one.text[:2000]}"

    answered()
    assert seen["accepted"] > 2 and seen["refused"] > 30, seen


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("epochs=1000000000000000000000000000000", "a whole number of more than 64 bits"),
        ("epochs=2000000", "epochs: expected at most 1e+06"),
        ("optimise.learning_rate=1e30", "optimise.learning_rate: expected at most 1"),
        ("optimise.max_grad_norm=1e-300", "optimise.max_grad_norm: expected at least 1e-06"),
        ("optimise.learning_rate=1e-300", "optimise.learning_rate: expected at least 1e-12"),
        ("rollout.window_move=[1,1e300]", "rollout.window_move"),
        ("rewards.jpeg.shape.clip=[-1e300,1]", "rewards.jpeg.shape.clip: expected at least -1e+09"),
        ("rollout.resolution=1000000", "rollout.resolution: expected a side of 8 to 16384 pixels"),
        ("lora.rank=100000000", "lora.rank: expected at most 8192"),
        ("run_dir=/", 'run_dir: "/" holds more than a run'),
        ('run_dir="~"', "holds more than a run"),
        ("run_dir=/etc", "holds more than a run"),
        ("run_dir=/etc/run", "holds more than a run"),
        ("run_dir=/usr", "holds more than a run"),
        ("run_dir=/dev/shm", "holds more than a run"),
        ("run_dir=.", "holds more than a run"),
        ("run_dir=" + "x" * 300, "run_dir: not a folder's name"),
        ("model=" + "x" * 5000, "model: cannot be read: File name too long"),
        ("prompts.test=" + "x" * 5000 + ".txt", "prompts.test: cannot be read: File name too long"),
        ("rewards.foo.weight=1", 'command line: rewards.foo: unknown reward "foo"'),
        ("learning_rate=1e-4", 'command line: learning_rate: unknown key (nearest: "optimise.learning_rate")'),
        ("crd.beta=0.1", 'command line: crd: the objective is "nft", which does not use this section'),
        ("prompts.test=playground/compositional/train", "of its prompts are in prompts.train, too"),
    ],
)
def test_nonsense_is_named_where_it_stands(word: str, said: str, tmp_path: Path) -> None:
    kind, told = verdict(Mutation("run.yaml", text_of(BASE), [word]), tmp_path)
    assert kind == "refused" and said in told, told


def test_an_overlap_can_be_asked_for_by_name(tmp_path: Path) -> None:
    words = ["prompts.test=playground/compositional/train", "prompts.overlap=true"]
    assert verdict(Mutation("run.yaml", text_of(BASE), words), tmp_path) == ("accepted", "")


def test_another_objective_on_the_command_line_takes_the_files_own_section_out(tmp_path: Path) -> None:
    text = text_of({**BASE, "nft": {"beta": 0.2}})
    assert verdict(Mutation("run.yaml", text, ["objective=crd"]), tmp_path) == ("accepted", "")
    kind, said = verdict(Mutation("run.yaml", text + "objective: crd\n", []), tmp_path)
    assert kind == "refused" and 'nft: the objective is "crd"' in said
