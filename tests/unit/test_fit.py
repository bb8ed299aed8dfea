"""The estimate of memory: fake tensors must count what real ones would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from covering import some
from tiny import tiny_flux, tiny_sd, tiny_sd3
from tiny_models.recent import TINY, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.memory import advice, fit
from diffrl.memory.advice import advise
from diffrl.memory.buffers import Alive, held
from diffrl.memory.counted import Counted
from diffrl.memory.layout import cuda_autocast, pretend
from diffrl.memory.selection import rollout_forwards
from diffrl.memory.step_profile import StepProfile
from diffrl.policy import load_policy
from diffrl.policy.lora import LoraSpec
from diffrl.run.train import Run

MODELS = {
    "sd3": lambda folder: tiny_sd3(folder, t5=True, max_sequence_length=8),
    "flux": tiny_flux,
    "sd": tiny_sd,
    "sdxl": lambda folder: tiny_sd(folder, xl=True),
}
NEW = {name: one.resolution for name, one in TINY.items() if not name.endswith(("-turbo", "-distilled"))}
LAID_OUT = ("lumina2", "hidream", "qwen-image-2.1")  # whose layouts are made of values
FAMILIES = [
    "sd3",
    *(pytest.param(name, marks=pytest.mark.long) for name in MODELS if name != "sd3"),
    *some(LAID_OUT, "lumina2"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in NEW if name not in LAID_OUT),
]


def peak_of(forward, parameters) -> int:
    with Alive(parameters) as alive:
        forward()
    return alive.peak


@pytest.mark.parametrize("family", FAMILIES)
def test_fake_tensors_count_what_real_ones_need(config_file, tmp_path: Path, family: str) -> None:
    """Bytes of a training micro-batch, a sampling forward and a decoding, the arithmetic of sampling and decoding, and
    resident weights: on the policy itself, with values, and as estimated from its configs."""
    folder = tmp_path / family
    model, side = (MODELS[family](folder), 16) if family in MODELS else (make(family, folder), NEW[family])
    # rwr has no forwards beside the trained one's; what an epoch keeps is counted on top of a phase's own peak.
    config = load_config(config_file("run", model=str(model), rollout={"resolution": side}, objective="rwr"))
    found = fit.estimate(config)
    rows, batch, real = found.rows, config.rollout.batch_size, {}
    for train, count in ((True, rows), (False, batch)):
        # Anew for each: of tables that a network keeps beside its buffers a second forward sees only what it slices.
        policy = load_policy(str(model), lora=LoraSpec(rank=4, alpha=8), resolution=side)
        if found.text is not None:  # tokens of the longest prompt
            policy.backbone.max_length = found.text[0]
        x, t = torch.randn(count, *policy.latent_shape), torch.full((count,), 0.5)
        cond = policy.backbone.blank(count, torch.float32)
        inputs = [x, t, cond.embeds, cond.pooled, *cond.extra]  # made outside of what is counted
        for tensor in inputs[2:]:
            tensor.normal_()

        def forward(policy=policy, x=x, t=t, cond=cond, train=train) -> None:
            with torch.set_grad_enabled(train):
                prediction = policy.predict(x, t, cond)
                if train:
                    prediction.v.square().mean().backward()

        kept = policy.lora.fused.prepare(torch.float32)  # merged weights are a part of their own
        real[train] = peak_of(forward, [*policy.network.parameters(), *kept, *inputs]) + sum(v.nbytes for v in inputs)
    beside = held(config, policy.backbone, fit.build_objective(config, config.rollout, {}), 0, 0)
    assert found.peaks[f"training {rows} rows"] == pytest.approx(real[True] + beside.training, rel=0.05)
    assert found.peaks[f"sampling {batch} rows"] == pytest.approx(real[False] + beside.sampling, rel=0.05)
    with FlopCounterMode(display=False) as counter:
        forward()  # of the sampling batch
    images = config.rollout.images
    assert found.work["sampling"] == pytest.approx(
        counter.get_total_flops() * images * config.rollout.steps / batch, rel=0.05
    )
    latents = x[: StepProfile(policy.backbone, config).chunk]
    with FlopCounterMode(display=False) as counter:
        policy.decode(latents)
    assert found.work["decoding"] == pytest.approx(counter.get_total_flops() * images / len(latents), rel=0.05)
    network = sum(p.nbytes for n, p in policy.network.named_parameters() if "lora_" not in n)
    assert found.parts["network"] == network
    tables = sum(table.nbytes for table in policy.network.buffers() if table.is_floating_point())
    assert found.parts["positions and other tables of the network"] == tables
    assert found.parts["merged weights, 2 of them"] == 2 * sum(tensor.nbytes for tensor in kept) > 0
    assert found.parts["LoRA, 2 of them"] == 2 * sum(p.nbytes for _, p in policy.trainable)


def test_norms_are_counted_as_under_cudas_autocast_and_tables_of_a_network_once() -> None:
    """Under the CPU's a norm keeps its narrow input: on an H200 SD3.5 and Qwen-Image needed up to 1.07 of the count. A
    table that is seen through a view is no new tensor: SD3.5's positions were counted again in each phase."""
    network = torch.nn.Linear(1024, 1, bias=False).bfloat16()
    network.register_buffer("table", torch.empty(1000))
    rows, wide = 64, 64 * 1024 * 4
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_autocast():
        pretend(network)
        x = torch.empty(rows, 1024, dtype=torch.bfloat16, requires_grad=True)

        def phase(alive: Alive) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                torch.nn.functional.layer_norm(x, (1024,))
            network.table.view(10, 100)

        count = StepProfile(SimpleNamespace(network=network, vae=torch.nn.Identity()), None).count(phase, [x])
    assert count.peak == 2 * wide + 2 * rows * 4  # the copy, what comes out, each row's mean and deviation
    with cuda_autocast(), torch.autocast("cpu", torch.bfloat16):  # a training beside it
        assert torch.nn.functional.layer_norm(torch.zeros(4).bfloat16(), (4,)).dtype == torch.bfloat16


def test_in_bf16_the_lora_is_counted_in_float32_and_no_weights_are_merged(config_file, tmp_path: Path) -> None:
    model = MODELS["sd3"](tmp_path / "sd3")
    wide, narrow = (
        fit.estimate(load_config(config_file(name, model=str(model), optimise={"precision": name})))
        for name in ("fp32", "bf16")
    )
    policy = load_policy(str(model), lora=LoraSpec(rank=4, alpha=8), precision="bf16")
    assert narrow.parts["LoRA, 3 of them"] == 3 * sum(p.nbytes for _, p in policy.trainable)
    assert narrow.parts["LoRA, 3 of them"] == wide.parts["LoRA, 3 of them"]
    assert 2 * narrow.parts["network"] == wide.parts["network"]
    assert policy.lora.fused.prepare(torch.bfloat16) == [], "as in a run"
    assert [name for name in narrow.parts if name.startswith("merged")] == []
    assert [name for name in wide.parts if name.startswith("merged")] == ["merged weights, 2 of them"]


def test_counting_draws_nothing(config_file) -> None:
    """A LoRA of Qwen-Image took seconds to draw, and a run with `micro_batch: auto` drew other numbers after it."""
    before = torch.random.get_rng_state()
    fit.estimate(load_config(config_file("run")))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_compiled_blocks_merge_nothing(config_file) -> None:
    found = fit.estimate(load_config(config_file("run"), ["engine.compile=true"]))
    assert not [name for name in found.parts if name.startswith("merged")]


@pytest.mark.long
def test_options_that_save_memory_do(config_file) -> None:
    path = config_file("run")

    def training(*overrides: str) -> int:
        peaks = fit.estimate(load_config(path, overrides)).peaks
        return next(size for name, size in peaks.items() if name.startswith("training"))

    plain = training()
    assert training("optimise.micro_batch=0.25") < 0.7 * plain
    assert training("optimise.gradient_checkpointing=true") < plain
    assert training("optimise.precision=bf16") < plain


def test_a_sharded_network_is_counted_by_its_share_and_two_blocks(tmp_path: Path, config_file) -> None:
    config = load_config(config_file("run", model=str(tiny_flux(tmp_path / "flux")), rollout={"resolution": 16}))
    whole, four = fit.estimate(config), fit.estimate(config, world=4, sharded=True)
    policy = load_policy(config.model, resolution=16)
    blocks = [*policy.network.transformer_blocks, *policy.network.single_transformer_blocks]
    largest = max(sum(p.nbytes for n, p in block.named_parameters() if "lora_" not in n) for block in blocks)
    lora = max(sum(p.nbytes for n, p in block.named_parameters() if "lora_" in n) for block in blocks)
    expected = whole.parts["network"] // 4 + 2 * largest
    assert expected <= four.parts["network"] <= expected + 2 * lora  # the blocks' own LoRA is counted along
    assert four.parts["autoencoder"] == whole.parts["autoencoder"]


@pytest.mark.long
def test_configs_that_share_a_network_are_counted_as_each_alone(config_file) -> None:
    """One after the other, and again in the other order: no count leaves anything behind for the next one."""
    path, part = config_file("run"), "optimise.micro_batch=0.25"
    cases = [
        ([], 1), (["optimise.gradient_checkpointing=true"], 1), ([part], 1), (["optimise.precision=bf16"], 1),
        ([], 4),  # spread: nothing is merged
        (["evaluate.resolution=32", "rollout.guidance_scale=1"], 1), (WORKS["direct"], 1),
    ]  # fmt: skip
    configs = [(load_config(path, words), world, world > 1) for words, world in cases]
    alone, counted = [fit.estimate(*one) for one in configs], Counted()
    assert [fit.estimate(*one, counted) for one in configs] == alone
    assert [fit.estimate(*one, counted) for one in reversed(configs)] == alone[::-1]
    assert len({str(found) for found in alone}) == len(alone)  # each is a count of its own


def test_what_was_counted_is_not_counted_again(config_file, monkeypatch: pytest.MonkeyPatch) -> None:
    path, counted, ran, train = config_file("run"), Counted(), [], StepProfile.train
    configs = [load_config(path, [f"optimise.micro_batch={rows}"]) for rows in (24, 2, 24)]
    monkeypatch.setattr(StepProfile, "train", lambda own, rows, *others: ran.append(rows) or train(own, rows, *others))
    first, _, again = [fit.estimate(one, counted=counted) for one in configs]
    assert first == again and ran == [24, 2]


@pytest.mark.long
def test_advice_fits_and_none_is_given_where_nothing_helps(config_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "CONTEXT", 0)
    monkeypatch.setattr(advice, "CONTEXT", 0)
    path = config_file("run", optimise={"micro_batch": None})  # training then needs more than decoding
    config = load_config(path)
    whole = fit.estimate(config)
    assert advise(config, whole.total) == (whole, [])
    smaller, overrides = advise(config, whole.total - 1)
    # One row less costs no arithmetic, and recomputing would; of 24 rows 23 make two micro-batches of 12.
    assert smaller.total < whole.total and overrides == ["optimise.micro_batch=23"] and smaller.rows == 12
    assert smaller.work == pytest.approx(whole.work)
    assert fit.estimate(load_config(path, overrides)).total == smaller.total
    assert advise(config, sum(whole.parts.values())) is None


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (2450, []),
        (2449, ["optimise.micro_batch=23"]),
        (250, ["optimise.micro_batch=2"]),
        (149, ["optimise.gradient_checkpointing=true", "optimise.micro_batch=3"]),
        (79, None),
    ],
)
def test_the_fastest_setting_that_fits_is_advised(config_file, monkeypatch, free: int, expected) -> None:
    """Of a micro-batch of 24 rows, each of 100 bytes, or 30 where activations are recomputed at a third more work."""

    def counted(config, *_: object, **__: object) -> fit.Fit:
        rows, recompute = config.optimise.micro_batch or 24, config.optimise.gradient_checkpointing
        peaks = {"encoding": 1, "decoding": 1, "sampling": 1, "training": (30 if recompute else 100) * rows}
        work = {"training": 4.0 if recompute else 3.0}
        return fit.Fit({"network": 50}, peaks, rows, 0, work, {"sampling": 1, "training": 1})

    monkeypatch.setattr(advice, "estimate", counted)
    monkeypatch.setattr(advice, "CONTEXT", 0)
    monkeypatch.setattr(fit, "CONTEXT", 0)
    for module in (advice, fit):
        monkeypatch.setattr(module, "SLACK", 1.0)
    found = advise(load_config(config_file("run", optimise={"micro_batch": None})), free)
    assert (None if found is None else found[1]) == expected


def test_encoders_apart_and_single_images_are_advised_where_only_they_are_too_large(config_file, monkeypatch) -> None:
    """A network of 50 bytes and encoders of 90 beside it, 40 apart; 8 images decoded need 80 bytes, one 10."""

    def counted(config, *_: object, **__: object) -> fit.Fit:
        encoding = 40 if config.engine.encoders == "apart" else 90
        peaks = {"encoding": encoding, "decoding": 10 * (config.engine.decode or 8), "sampling": 1, "training": 1}
        return fit.Fit({"network": 50}, peaks, 24, 0, {"training": 3.0}, {})

    monkeypatch.setattr(advice, "estimate", counted)
    for module in (advice, fit):
        monkeypatch.setattr(module, "CONTEXT", 0)
        monkeypatch.setattr(module, "SLACK", 1.0)
    config = load_config(config_file("run"))
    apart, single = "engine.encoders=apart", "engine.decode=1"
    for free, expected in ((140, []), (139, [apart]), (130, [apart]), (129, [apart, single]), (90, [apart, single])):
        found = advise(config, free)
        assert found is not None and found[1] == expected and found[0].total <= free
    assert advise(config, 89) is None


def test_encoders_that_are_smaller_than_what_makes_room_need_nothing_more(config_file, capsys) -> None:
    """On top of what is there all the time, which a waiting network leaves: less than nothing is never needed."""
    beside, apart = (
        fit.estimate(load_config(config_file("run"), [f"engine.encoders={how}"])) for how in ("beside", "apart")
    )
    away = sum(size for name, size in apart.parts.items() if name == "network" or name.startswith("merged"))
    assert 0 < beside.peaks[fit.ENCODING] < away and apart.peaks[fit.ENCODING] == 0
    assert apart.total == beside.total and apart.host == beside.host + apart.parts["network"]
    main(["doctor", str(config_file("run")), "engine.encoders=apart", "--gpu", "8"])
    assert "0.00 GiB  encoding, at its peak" in capsys.readouterr().out


def test_doctor_of_several_configs_says_what_it_says_of_each(config_file, capsys) -> None:
    paths = [str(config_file("one")), str(config_file("two", rollout={"batch_size": 2}))]
    alone = []
    for path in paths:
        assert main(["doctor", path, "lora.rank=2", "--gpu", "24"]) == 0
        alone.append(f"{path}:\n{capsys.readouterr().out}")
    assert main(["doctor", *paths, "lora.rank=2", "--gpu", "24"]) == 0
    assert capsys.readouterr().out == "".join(alone)
    assert alone[0].split("\n", 1)[1] != alone[1].split("\n", 1)[1]
    assert main(["doctor", *paths, "--gpu", "0.1"]) == 1  # none fits, and both are looked at
    assert capsys.readouterr().out.count("it does not fit") == 2


def test_doctor_says_whether_a_config_fits(config_file, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from diffrl.cli import doctor

    path = str(config_file("run", optimise={"micro_batch": None}))
    assert main(["doctor", path]) == 0
    assert "it fits" in capsys.readouterr().out
    needed = fit.estimate(load_config(path)).total
    monkeypatch.setattr(doctor, "_free", lambda: ("a small card", needed - 1))
    assert main(["doctor", path]) == 1
    assert "it would: optimise.micro_batch=23" in capsys.readouterr().out
    assert main(["doctor", path, "--gpu", "24", "--processes", "2"]) == 0
    assert "24.00 GiB  free: a device of 24 GiB" in capsys.readouterr().out
    for words in (["--gpu", "much"], ["--gpu", "-1"], ["--gpu", "nan"], ["--processes", "1.5"], ["--processes", "3"]):
        assert main(["doctor", path, *words]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert main(["doctor", "--gpu", "24"]) == 2
    monkeypatch.setattr(doctor, "_free", lambda: ("a tiny card", 1000))
    assert main(["doctor", path]) == 1
    assert "would not help" in capsys.readouterr().out


WORKS = {
    "nft": ["objective=nft", "nft.beta=0.1"],
    "nft without a penalty": ["objective=nft", "nft.beta=0", "optimise.gradient_checkpointing=true"],
    "guided grpo": ["objective=grpo", "rollout.sampler=flow_sde", "rollout.guidance_scale=3", "grpo.beta=0.1"],
    "crd": ["objective=crd", "optimise.micro_batch=null", "optimise.inner_epochs=2"],
    "gdro": ["objective=gdro"],
    "awm": ["objective=awm", "optimise.inner_epochs=2"],
    "dgpo": ["objective=dgpo", "dgpo.anchor_guidance=3"],
    "dgpo, no penalty": ["objective=dgpo", "dgpo.beta=0"],
    "fdfo": ["objective=fdfo", "rollout.sampler=cps", "rollout.noise_level=0.1", "rollout.same_noise=true"],
    "scouted": ["objective=nft", "rollout.scout.images=7", "rollout.scout.steps=2"],
    "dpo": ["objective=dpo"],
    "prdp": ["objective=prdp", "rollout.sampler=flow_sde", "rollout.guidance_scale=3"],
    "sft": ["objective=rwr", "rwr.weights=best"],
    "opd": ["objective=opd", "opd.teachers={a: {guidance: 3}, b: {prompts: [], everywhere: 0.1}}"],
    "rwr": ["objective=rwr"],
    "srpo": [
        "objective=direct",
        "direct.align={}",
        "direct.pair={}",
        "direct.beta=0.1",
        f"rewards.redness.plugin={Path(__file__).parents[1] / 'data' / 'embedder.py'}:Embedder",
    ],
    "direct": ["objective=direct", f"rewards.redness.plugin={Path(__file__).parents[1] / 'data' / 'warmth.py'}:Warmth"],
}


PLANS = {
    "plain": [],
    "scouted": ["rollout.scout.images=7", "rollout.scout.steps=2"],
    "tail": ["rollout.steps=6", "rollout.sampler=flow_sde", "rollout.window=2", "objective=grpo", "rollout.tail=0.5"],
    "dense": ["dense={}"],
    "dense, one noise": ["dense={}", "rollout.same_noise=true", "rollout.steps=5"],
    "branches": ["branches.seeds=2", "branches.steps=[0,3]", "rollout.steps=5"],
    "branches of split groups": [
        "branches.seeds=1",
        "branches.steps=[0,2]",
        "rollout.same_noise=true",
        "branches.strides=[1,2]",
        "rollout.batch_size=3",
    ],
    "tree": ["tree.splits=[0,1]", "rollout.same_noise=true", "rollout.steps=4"],
    "tree of split groups": ["tree.splits=[1]", "tree.branch=4", "rollout.same_noise=true", "rollout.batch_size=3"],
}


@pytest.mark.parametrize("name", some(PLANS, "plain", "scouted", "tree"))
def test_the_forwards_of_a_rollout_are_those_that_it_takes(config_file, name: str) -> None:
    credit = name.split()[0].strip(",") in ("dense", "branches", "tree")
    words = [*(["objective=grpo", "rollout.sampler=flow_sde"] if credit else []), *PLANS[name]]
    config = load_config(config_file("run"), words)
    run = Run(config)
    assert rollout_forwards(config, run.objective) == run.loop.source(0)[0].forwards


def test_the_share_of_a_trees_rows_is_what_is_trained(config_file) -> None:
    words = ["objective=grpo", "rollout.sampler=flow_sde", "rollout.same_noise=true", "tree.splits=[0,1]"]
    run = Run(load_config(config_file("run"), words))
    rows: list[int] = []
    loop, parts_of = run.loop, run.loop._parts
    run.loop._parts = lambda *given: rows.append(sum(map(len, (made := parts_of(*given))[0]))) or made  # type: ignore
    run.loop.run_epoch(0)
    everything = loop.settings.group_size * 4 * 3  # of 4 groups and 3 steps
    assert sum(rows) / everything == pytest.approx(run.objective.cost(run.config.rollout, False, 1).share)


@pytest.mark.parametrize("name", some(WORKS, "nft", "direct"))
def test_the_work_of_an_epoch_is_what_an_epoch_does(config_file, name: str) -> None:
    """Counted on fake tensors from the configs, and by torch's counter on a real epoch, its prompts being encoded."""
    config = load_config(config_file("run"), WORKS[name])
    expected = fit.estimate(config).work
    run = Run(config)
    run.loop.run_epoch(0)  # from now on the snapshot lags behind
    with FlopCounterMode(display=False) as counter:
        run.loop.run_epoch(0)
    assert min(expected.values()) > 0
    # The pretrained model runs without the LoRA, which in so small a network is a tenth of a forward.
    assert sum(expected.values()) == pytest.approx(counter.get_total_flops(), rel=0.03)
