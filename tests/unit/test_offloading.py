"""Rewards that come to their device by phases: when they come and leave, what is counted for them, what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.memory.advice import advise
from diffrl.memory.buffers import Alive
from diffrl.memory.fit import APART, CONTEXT, REWARDS, SCORING, SLACK, Fit, estimate
from diffrl.memory.footprint import footprint
from diffrl.memory.reward_memory import RATE, reward_memory
from diffrl.policy import load_policy
from diffrl.policy.lora import LoraSpec
from diffrl.prompts import Prompt
from diffrl.reward_kinds.offloading import Offloaded, modules_of
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.registry import load_reward
from diffrl.rewards.scoring import Scorer
from diffrl.run.device import prepare_engine

MIB = 2**20
IMAGES = torch.rand(4, 3, 8, 8)
PROMPTS, GROUPS = [Prompt("a"), Prompt("a"), Prompt("b"), Prompt("b")], torch.tensor([0, 0, 1, 1])
SIZED = '''
import torch

class Sized:
    """16 MiB of weights on its device, by its own account."""

    name = "sized"

    def __init__(self, mib: int = 16, device: str | None = None) -> None:
        self.device = device or "cpu"

    @staticmethod
    def footprint(mib: int, **_):
        return None if mib == 0 else int(mib) * 2**20

    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3)).cpu()
'''


class Large:
    """A reward that notes where its weights are when it is called; scores stay in main memory."""

    device = "meta"

    def __init__(self, name: str, events: list[str], groupwise: bool = False) -> None:
        self.name, self.events, self.groupwise, self.model = name, events, groupwise, nn.Linear(4, 4)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        self.events.append(f"{self.name} scores {len(images)} on {self.model.weight.device.type}")
        return torch.arange(len(images), dtype=torch.float32)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has no values to compare."""
    monkeypatch.setattr(Scorer, "_look_for_writes", lambda *given: None)


def test_a_phase_brings_rewards_and_finish_sends_them_away_one_after_another(unread: None) -> None:
    events: list[str] = []

    @contextmanager
    def room() -> Iterator[None]:
        events.append("the network leaves")
        yield
        events.append("the network is back")

    one, two, three = Large("beside", events), Large("alone", events), Large("groups", events, groupwise=True)
    rewards = {"beside": Offloaded(one), "alone": Offloaded(two, apart=True), "groups": Offloaded(three, apart=True)}
    scorer = Scorer(rewards)
    assert scorer.later == ["alone", "groups"]
    scores = torch.cat([scorer.submit(part, PROMPTS[:2]).result() for part in IMAGES.split(2)])
    assert scores.isnan().tolist() == [[False, True, True]] * 4
    assert one.model.weight.is_meta, "it stays for the phase"
    scores = scorer.finish(scores, [IMAGES[:2], IMAGES[2:]], PROMPTS, GROUPS, room)
    assert scores.T.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 0, 1]]
    assert events == [
        *["beside scores 2 on meta"] * 2,
        "the network leaves",
        "alone scores 4 on meta",
        *["groups scores 2 on meta"] * 2,
        "the network is back",
    ]
    assert not any(reward.model.weight.is_meta for reward in (one, two, three))
    assert (scorer.take_copying() or 0) > 0 and scorer.take_copying() == 0
    assert Scorer({"a": Large("a", [])}).take_copying() is None


def test_group_wise_rewards_are_not_asked_in_the_wrong_phase(unread: None) -> None:
    events: list[str] = []
    scorer = Scorer({"groups": Large("groups", events, groupwise=True), "x": Offloaded(Large("x", events), apart=True)})
    scores = scorer.submit(IMAGES, PROMPTS).result()
    assert scores.isnan().all() and events == []
    scorer.finish(scores, [IMAGES], PROMPTS, GROUPS)
    assert [event.split()[0] for event in events] == ["groups", "groups", "x"]


@pytest.fixture
def sized(tmp_path: Path) -> str:
    path = tmp_path / "sized.py"
    path.write_text(SIZED)
    return f"{path}:Sized"


def counted(config_file: Any, sized: str, *overrides: str) -> Fit:
    config = load_config(config_file("run"), [f"watch.sized.plugin={sized}", *overrides])
    return estimate(config)


@pytest.mark.long
def test_doctor_counts_rewards_where_they_stand(config_file: Any, sized: str) -> None:
    plain, stays = estimate(load_config(config_file("run"))), counted(config_file, sized)
    beside = counted(config_file, sized, "watch.sized.offload=true")
    apart = counted(config_file, sized, "watch.sized.offload=apart")
    assert stays.parts == {**plain.parts, REWARDS: 16 * MIB} and stays.peaks == plain.peaks
    sampling = max(size for name, size in plain.peaks.items() if name.split()[0] in ("sampling", "decoding"))
    assert beside.peaks == {**plain.peaks, SCORING: sampling + 16 * MIB} and beside.parts == plain.parts
    merged = next(size for name, size in plain.parts.items() if name.startswith("merged"))
    assert apart.peaks == {**plain.peaks, APART: 16 * MIB - plain.parts["network"] - merged}
    assert beside.host == plain.host + 16 * MIB and apart.host == beside.host + plain.parts["network"]
    assert beside.copied == apart.copied == 0, "a watched reward is asked by evaluations alone"
    trained = [f"rewards.sized.plugin={sized}"]
    for how, more in (("true", 0), ("apart", 2 * plain.parts["network"])):
        found = estimate(load_config(config_file("run"), [*trained, f"rewards.sized.offload={how}"]))
        assert found.copied == 16 * MIB + more
    assert counted(config_file, sized, "watch.sized.device=cpu") == plain
    assert counted(config_file, sized, "watch.sized.device=cuda:1") == plain
    assert counted(config_file, sized, "watch.sized.mib=0").unknown == ("sized",)


def test_alike_rewards_are_counted_once_and_offloaded_together(config_file: Any, sized: str) -> None:
    twice = [f"watch.{name}.plugin={sized}" for name in ("sized", "again")]
    judges = reward_memory(load_config(config_file("run"), twice))
    assert list(judges.resident.values()) == [16 * MIB]
    assert set(judges.keys) == {"watch.sized.offload", "watch.again.offload"}


def test_rewards_make_way_where_they_must(config_file: Any, sized: str) -> None:
    """First beside sampling; apart where that is too much, too."""
    more = [f"watch.sized.plugin={sized}", "optimise.micro_batch=12", "rollout.batch_size=2"]
    config = load_config(config_file("run"), more)
    stays = estimate(config)
    found = advise(config, stays.total - 1)
    assert found is not None and found[1] == ["watch.sized.offload=true"]
    beside = CONTEXT + int(SLACK * (sum(found[0].parts.values()) + found[0].peaks[SCORING]))
    found = advise(config, beside - 1)
    assert found is not None and found[1] == ["watch.sized.offload=apart"] and found[0].total < beside


def test_rewards_that_learn_or_judge_batches_are_counted_and_stay(config_file: Any) -> None:
    names = ("adversarial_preference", "vendi", "preference")
    found = reward_memory(
        load_config(config_file("run", model="playground"), [f"rewards.{n}.device=cuda" for n in names])
    )
    assert set(names) <= found.resident.keys() and not set(found.unknown) & set(names)
    assert set(found.keys) & {f"rewards.{name}.offload" for name in names} == {"rewards.preference.offload"}


def test_doctor_tells_the_seconds_of_copies(config_file: Any, sized: str, capsys: pytest.CaptureFixture) -> None:
    path = config_file("run")
    words = [f"rewards.sized.plugin={sized}", "rewards.sized.mib=4096", "rewards.sized.offload=true"]
    assert main(["doctor", str(path), *words, "--gpu", "24"]) == 0
    said = capsys.readouterr().out
    assert (
        f"{4096 * MIB / RATE:9.2f} s    of copies in an epoch, offloaded rewards' 4.00 GiB at 10 GB/s, assumed" in said
    )
    assert main(["doctor", str(path), words[0], "rewards.sized.mib=0", "--gpu", "24"]) == 0
    assert "on top: sized, which declare no footprint" in capsys.readouterr().out


def test_footprints_are_the_weights_that_are_loaded() -> None:
    for name, arguments in (("clip", {}), ("clip", {"precision": "fp16"}), ("preference", {}), ("aesthetic", {})):
        reward = load_reward(name, device="cpu", **arguments)
        real = {id(p): p.nbytes for module in modules_of(reward) for p in module.parameters()}
        assert footprint(name, arguments) == pytest.approx(sum(real.values()), rel=0.03)


def test_footprints_of_published_weights() -> None:
    """A ViT-H/14 has as many parameters in open_clip as PickScore says, and a served model none here."""
    pickscore = footprint("pickscore", {"precision": "fp16"})
    assert pickscore == footprint("hpsv2", {"precision": "fp16"}) == 986_109_441 * 2
    assert footprint("imagereward", {}) == pytest.approx(1.8e9, rel=0.02)
    v2 = {"head": "v2"}
    assert footprint("aesthetic", v2) == 427_616_513 * 4 < (footprint("geneval", {}) or 0)
    assert footprint("vlm", {"server": "http://there/v1"}) == 0 == footprint("ocr", {})
    assert footprint("vlm", {"model": "no/model"}) is None
    half = {"precision": "fp16"}
    assert footprint("d2:pickscore", {"direction": "none.safetensors", **half}) == pickscore
    for name in ("adversarial_preference", "reform"):
        assert footprint(name, {"reward": "pickscore", **half}) == pickscore


def test_footprints_of_image_encoders(tmp_path: Path) -> None:
    """Of a model of image and text in transformers' format the image's half alone is loaded."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = CLIPModel(CLIPConfig(text_config=small, vision_config=small, projection_dim=16))
    model.config.save_pretrained(tmp_path)
    real = sum(parameter.nbytes for parameter in model.vision_model.parameters())
    given = {"features": "transformers", "model": str(tmp_path)}
    for name in ("adversarial", "similarity", "diversity", "vendi", "frechet"):
        assert footprint(name, given) == real and footprint(name, {}) == footprint("clip", {})


def test_what_is_refused_is_one_line(config_file: Any, sized: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["train", str(config_file("run")), "rewards.redness.offload=aprat", "--dry-run"]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and "rewards.redness.offload" in said and "apart" in said
    assert main(["doctor", str(config_file("run")), f"watch.sized.plugin={sized}", "watch.sized.mib=much"]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1 and "sized: footprint() of Sized failed with ValueError" in said
    config = load_config(config_file("run"), [f"watch.sized.plugin={sized}", "watch.sized.offload=apart"])

    class Sharded:
        sharded = True
        backbone: Any = type("Backbone", (), {"network": None})

    with pytest.raises(UserError, match=r"^watch\.sized\.offload: apart moves a whole network, and FSDP2"):
        prepare_engine(config, Sharded())  # type: ignore[arg-type]


def test_where_a_device_shares_the_cpus_memory_nothing_is_offloaded(sized: str) -> None:
    """An Apple device by its name alone; elsewhere this reward, which has no modules, is told so."""
    asked = Entry(sized, {}, offload=True)
    assert not isinstance(build_rewards({"a": asked}, torch.device("mps"))["a"], Offloaded)
    with pytest.raises(UserError, match="no torch modules, so nothing of it can be offloaded"):
        build_rewards({"a": asked}, torch.device("cuda"))


def test_reading_a_model_takes_its_full_size_whatever_it_becomes(
    config_file: Any, tiny_model: Path, reads: None
) -> None:
    """Counted at every operation while the files are read; of few bits, too, the full network is read."""
    config = load_config(config_file("run"))
    found = estimate(config).read
    assert estimate(load_config(config_file("run"), ["engine.base=int8"])).read == found
    with Alive([]) as alive:
        policy = load_policy(str(tiny_model), lora=LoraSpec(rank=1, alpha=1))
    network, vae = policy.backbone.network, policy.vae
    lora = sum(p.nbytes for _, p in policy.trainable)
    modules = (network, vae, *policy.backbone.text_encoders)
    assert found == sum(p.nbytes for module in modules for p in module.parameters()) - lora
    assert found <= alive.peak < 1.5 * found, "all of it, and what one component takes while it is read"
