"""`diffrl export`: merged weights draw what the LoRA on its base draws; nothing half-written; memory is one shard's."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from comfyui import Comfy
from covering import some
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiny import PROMPTS, SPEC, scramble, tiny_sd, tiny_sd3
from tiny_models.recent import make

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.policy import load_policy
from diffrl.records import checkpoint, saving
from diffrl.records.disk import DiskError
from diffrl.sharing import merged
from diffrl.sharing.export import choose, export_comfyui, export_merged


def lora(model: Path, folder: Path, seed: int = 1, std: float = 0.1) -> str:
    policy = load_policy(str(model), lora=SPEC)
    scramble(policy, seed=seed, std=std)
    policy.save_lora(folder)
    return str(folder)


def picture(model: Path, dtype: torch.dtype, loras: dict[str, float] | None = None, steps: int = 2) -> np.ndarray:
    """Of diffusers' own pipeline, with LoRAs of diffusers' own loader."""
    index = json.loads((Path(model) / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    pipe = diffusers.DiffusionPipeline.from_pretrained(model, torch_dtype=dtype, **absent)
    for name in loras or {}:
        pipe.load_lora_weights(name, adapter_name=f"a{abs(hash(name))}")
    if loras:
        pipe.set_adapters([f"a{abs(hash(name))}" for name in loras], list(loras.values()))
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": steps, "height": 16, "width": 16, "output_type": "np"}
    return pipe(PROMPTS[0], generator=torch.Generator().manual_seed(0), **call).images[0]


@pytest.fixture(scope="module", params=some(["sd3", "sd", "z-image"], "sd", "z-image"))
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    if request.param == "sd3":
        return tiny_model
    return tiny_sd(folder / "sd") if request.param == "sd" else make("z-image", folder / "z")


def test_the_picture_is_that_of_the_loras_on_the_base(model: Path, tmp_path: Path) -> None:
    one, two = lora(model, tmp_path / "one"), lora(model, tmp_path / "two", seed=2)
    loras = {one: 0.7, two: 1.0}
    export_merged(str(model), tmp_path / "out", loras=list(loras.items()), dtype="fp32", shard=20_000)
    index = [*(tmp_path / "out").glob("*/diffusion_pytorch_model.safetensors.index.json")]
    assert index and len(set(json.loads(index[0].read_text())["weight_map"].values())) > 2, "several files"
    expected, found = picture(model, torch.float32, loras), picture(tmp_path / "out", torch.float32)
    gap = np.abs(expected - found)
    assert gap.mean() < 1e-6 and gap.max() < 1e-5  # a tiny random network adds up the rounding of its sums
    assert np.abs(found - picture(model, torch.float32)).max() > 1e-3, "the LoRAs change the picture"
    load_policy(str(tmp_path / "out"))  # and ours


def test_a_dora_and_others_beside_it(model: Path, tmp_path: Path) -> None:
    """With convolutions, at a strength, from a file that peft has written."""
    layers = list(load_policy(str(model), lora=SPEC).lora.layers)[:4]
    index = json.loads((model / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    pipe = diffusers.DiffusionPipeline.from_pretrained(model, **absent)
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    network = getattr(pipe, part)
    convs = [
        name for name, module in network.named_modules() if isinstance(module, torch.nn.Conv2d) and "resnets" in name
    ]
    network.add_adapter(LoraConfig(r=2, lora_alpha=3, target_modules=[*layers, *convs[:2]], use_dora=True))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data.normal_(std=0.2, generator=generator)
        elif "magnitude" in name:
            parameter.data.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    words = {f"{part}_lora_layers": get_peft_model_state_dict(network)}
    words |= {f"{part}_lora_adapter_metadata": network.peft_config["default"].to_dict()}
    type(pipe).save_lora_weights(tmp_path / "dora", **words)
    loras = {str(tmp_path / "dora"): 0.7, lora(model, tmp_path / "other"): 1.0}
    export_merged(str(model), tmp_path / "out", loras=list(loras.items()), dtype="fp32")
    gap = np.abs(picture(model, torch.float32, loras) - picture(tmp_path / "out", torch.float32))
    assert gap.mean() < 1e-6 and gap.max() < 1e-5
    with pytest.raises(UserError, match="ComfyUI divides a DoRA"):
        export_comfyui(str(model), tmp_path / "x.safetensors", loras=list(loras.items()))


def test_bf16_is_the_weights_rounded_once(model: Path, tmp_path: Path) -> None:
    name = lora(model, tmp_path / "one")
    for dtype in ("fp32", "bf16"):
        export_merged(str(model), tmp_path / dtype, loras=[(name, 1.0)], dtype=dtype)
    for part in ("transformer", "unet"):
        for file in (tmp_path / "fp32" / part).glob("*.safetensors"):
            full, narrow = load_file(file), load_file(tmp_path / "bf16" / part / file.name)
            for key, value in full.items():
                assert narrow[key].dtype == torch.bfloat16
                torch.testing.assert_close(narrow[key].float(), value, rtol=2**-8, atol=0)
    expected = picture(model, torch.float32, {name: 1.0}, steps=1)
    assert np.abs(expected - picture(tmp_path / "bf16", torch.float32, steps=1)).mean() < 2e-3
    vae = [load_file(tmp_path / dtype / "vae/diffusion_pytorch_model.safetensors") for dtype in ("fp32", "bf16")]
    assert all(torch.equal(vae[0][key], vae[1][key]) for key in vae[0]), "the autoencoder stays as it is"


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Path:
    """A run's folder, made by hand: a LoRA, and two checkpoints with an EMA."""
    folder = tmp_path / "run"
    lora(tiny_model, folder / "lora", seed=1)
    policy = load_policy(str(tiny_model), lora=SPEC)
    for step in (1, 2):
        states = {}
        for number, name in enumerate(("lora", "ema")):
            scramble(policy, seed=10 * step + number, std=0.2)
            states[name] = policy.state("default")
        saving.save(folder, step, states, {"epoch": step}, keep=2)
    (folder / "config.yaml").write_text(f"model: {tiny_model}\n")
    return folder


def test_a_run_s_step_snapshot_and_strength(run: Path, tiny_model: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    class Read:
        model = str(tiny_model)
        lora = SimpleNamespace(merge=[], start=None, model_dump=lambda: {"rank": SPEC.rank, "alpha": SPEC.alpha})

    monkeypatch.setattr("diffrl.config.load_config", lambda path: Read)
    base = load_file(tiny_model / "transformer/diffusion_pytorch_model.safetensors")
    newest, _ = merged_lora(run / "lora")
    over = [f"{run / 'lora'}=0.25"]  # what it was trained over is written, too
    for words, step, name, strength, Read.lora.merge in (
        ([], None, None, 1.0, []),
        (["--strength", "0.5"], None, None, 0.5, []),
        (["--strength", "0.5"], None, None, 0.75, over),
        (["--step", "1"], 1, "ema", 1.0, []),
        (["--snapshot", "default"], 2, "lora", 1.0, []),
    ):
        assert main(["export", str(run), "--merged", "--out", str(tmp_path / "out"), *words]) == 0
        state = newest if step is None else checkpoint.load(run / f"checkpoints/step-{step:06d}")[0][name]
        found = load_file(tmp_path / "out/transformer/diffusion_pytorch_model.safetensors")
        for layer in {key.rsplit(".lora_", 1)[0] for key in state}:
            change = strength * SPEC.scale * state[f"{layer}.lora_B.weight"] @ state[f"{layer}.lora_A.weight"]
            torch.testing.assert_close(found[f"{layer}.weight"], base[f"{layer}.weight"] + change, rtol=0, atol=1e-6)
    assert "peak memory:" in capsys.readouterr().out
    with pytest.raises(UserError, match="a run's checkpoint, which has no alpha"):
        load_policy(str(tiny_model), start=run / "checkpoints/step-000001/lora.safetensors")
    for words, text in (
        (["--step", "7"], "there are 1, 2"),
        (["--snapshot", "emma"], "there are default, ema"),
    ):
        assert main(["export", str(run), "--merged", "--out", str(tmp_path / "out"), *words]) == 2
        assert text in capsys.readouterr().err


def test_a_step_is_read_from_its_checkpoint_alone(
    run: Path, tiny_model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Its LoRA was read behind that of RUN/lora: no step could be written where that was gone, or of another kind."""
    section = SimpleNamespace(merge=[], start=None, model_dump=lambda: {"rank": SPEC.rank, "alpha": SPEC.alpha})
    config = SimpleNamespace(model=str(tiny_model), lora=section)
    monkeypatch.setattr("diffrl.config.load_config", lambda path: config)
    for damage in (lambda file: file.write_bytes(b"half"), lambda file: file.unlink()):
        damage(run / "lora/pytorch_lora_weights.safetensors")
        _, (step_1,) = choose(str(run), step=1)
        state = checkpoint.load(run / "checkpoints/step-000001")[0]["ema"]
        assert step_1.name == f"{run}/checkpoints/step-000001:ema"
        for key, value in state.items():
            assert torch.equal(step_1.state[key], value * (SPEC.scale if "lora_B" in key else 1.0))
    file = run / "checkpoints/step-000002/lora.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    choose(str(run), step=1)
    assert choose(str(run), snapshot="ema")[1][0].name == f"{run}/checkpoints/step-000001:ema"
    assert main(["export", str(run), "--step", "2", "--merged", "--out", str(tmp_path / "out")]) == 1
    assert "step-000002/lora.safetensors: " in (error := capsys.readouterr().err) and "bytes instead of" in error


def test_a_step_of_a_run_that_began_as_a_lora_of_text_encoders_has_that_part(tmp_path: Path, monkeypatch) -> None:
    """The encoders' part is not trained: it is in RUN/lora, in what the run began as, and in no checkpoint."""
    model, start, run = tiny_sd(tmp_path / "sd"), tmp_path / "start.safetensors", tmp_path / "run"
    policy = load_policy(str(model), lora=SPEC)
    scramble(policy)
    policy.save_lora(tmp_path)
    stem = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    size = policy.backbone.pipe.text_encoder.config.hidden_size
    text = {f"{stem}.lora_A.weight": torch.ones(2, size), f"{stem}.lora_B.weight": torch.ones(size, 2)}
    save_file(load_file(tmp_path / "pytorch_lora_weights.safetensors") | text, start)
    policy = load_policy(str(model), lora=SPEC, start=start)
    policy.save_lora(run / "lora")
    saving.save(run, 1, {"lora": policy.state("default")}, {"epoch": 1}, keep=1)
    (run / "config.yaml").write_text("model: x\n")
    words = {"rank": SPEC.rank, "alpha": SPEC.alpha}
    section = SimpleNamespace(merge=[], start=str(start), model_dump=lambda: words)
    monkeypatch.setattr("diffrl.config.load_config", lambda path: SimpleNamespace(model=str(model), lora=section))
    newest, step = choose(str(run))[1], choose(str(run), step=1)[1]
    assert [one.part for one in newest] == [one.part for one in step] == [None, "text_encoder"]
    for one, other in zip(newest, step, strict=True):
        assert one.state.keys() == other.state.keys()
        for key in one.state:
            factors = [lora.scale if "lora_B" in key else 1.0 for lora in (one, other)]
            torch.testing.assert_close(factors[0] * one.state[key], factors[1] * other.state[key])


def merged_lora(folder: Path) -> tuple[dict[str, torch.Tensor], object]:
    tensors = load_file(folder / "pytorch_lora_weights.safetensors")
    return {key.removeprefix("transformer."): value for key, value in tensors.items()}, None


def test_several_loras_in_one_file_for_comfyui(tiny_model: Path, tmp_path: Path) -> None:
    names = [lora(tiny_model, tmp_path / "one"), lora(tiny_model, tmp_path / "two", seed=2)]
    export_comfyui(str(tiny_model), tmp_path / "both.safetensors", loras=[(names[0], 0.7), (names[1], 1.0)])
    network = diffusers.SD3Transformer2DModel.from_pretrained(tiny_model, subfolder="transformer")
    comfy = Comfy("StableDiffusion3Pipeline", network)
    comfy.apply(load_file(tmp_path / "both.safetensors"))
    export_merged(str(tiny_model), tmp_path / "out", loras=[(names[0], 0.7), (names[1], 1.0)])
    expected = load_file(tmp_path / "out/transformer/diffusion_pytorch_model.safetensors")
    for name in comfy.places:
        torch.testing.assert_close(comfy.layer(name), expected[f"{name}.weight"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("run/lora", '"run/lora" is a folder'),
        ("mine.pt", "what is written is a .safetensors file"),
        ("run/lora/pytorch_lora_weights.safetensors", "is one of the files that are read"),
        ("run/checkpoints/step-000001/lora.safetensors", "is one of the files that are read"),
        ("link.safetensors", "is one of the files that are read"),
        ("other/lora/pytorch_lora_weights.safetensors", "or a run's own; name another file"),
        ("other/dial/lora/pytorch_lora_weights.safetensors", "or a run's own; name another file"),
        ("two/pytorch_lora_weights.safetensors", "is one of the files that are read"),
    ],
)
def test_comfyui_s_file_takes_the_place_of_nothing_that_is_read(
    run: Path, tiny_model: Path, tmp_path: Path, monkeypatch, capsys, file: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lora(tiny_model, tmp_path / "two", seed=2)
    shutil.copytree(run, "other")
    shutil.copytree("other/lora", "other/dial/lora")
    Path("link.safetensors").symlink_to("run/lora/pytorch_lora_weights.safetensors")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["export", "run", "--lora", "two", "--comfyui", file]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert said in error and "--comfyui: " in error
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_an_earlier_file_for_comfyui_is_replaced(tiny_model: Path, tmp_path: Path, capsys) -> None:
    words = ["export", str(tiny_model), "--lora", lora(tiny_model, tmp_path / "one")]
    (tmp_path / "config.yaml").write_text("{}")  # a user's own, beside which no run has trained
    file = tmp_path / "lora" / "mine.safetensors"
    assert main([*words, "--comfyui", str(file)]) == main([*words, "--comfyui", str(file)]) == 0
    assert "is there already and will be replaced" in capsys.readouterr().err


def test_a_full_disk_or_a_kill_leaves_nothing_half_written(tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    name = lora(tiny_model, tmp_path / "one")
    export_merged(str(tiny_model), tmp_path / "out", loras=[(name, 1.0)])
    before = (tmp_path / "out" / merged.RECORD).read_text()

    def full(*words: object, **rest: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(merged, "save_file", full)
        with pytest.raises(DiskError, match="No space left"):
            export_merged(str(tiny_model), tmp_path / "out", loras=[(name, 0.5)])
    assert (tmp_path / "out" / merged.RECORD).read_text() == before and not [*tmp_path.glob(".out*")]
    with monkeypatch.context() as patch:
        patch.setattr(merged.shutil, "disk_usage", lambda path: type("Free", (), {"free": 10})())
        with pytest.raises(DiskError, match="are to be written"):
            export_merged(str(tiny_model), tmp_path / "out", loras=[(name, 0.5)])

    if (child := os.fork()) == 0:
        merged._sync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
        export_merged(str(tiny_model), tmp_path / "out", loras=[(name, 0.5)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "out" / merged.RECORD).read_text() == before and [*tmp_path.glob(".out.tmp-*")]
    export_merged(str(tiny_model), tmp_path / "out", loras=[(name, 0.5)])
    assert (tmp_path / "out" / merged.RECORD).read_text() != before and not [*tmp_path.glob(".out*")]


def test_an_earlier_export_is_put_back_where_the_new_one_did_not_take_its_place(
    tiny_model: Path, tmp_path: Path, monkeypatch
) -> None:
    """It stands aside for a moment: a kill just then had left it to be removed by the next try, which might fail."""
    name, out = lora(tiny_model, tmp_path / "one"), tmp_path / "out"
    export_merged(str(tiny_model), out, loras=[(name, 1.0)])
    before = (out / merged.RECORD).read_text()

    def full(*words: object, **rest: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out.rename(tmp_path / ".out.tmp-999999999-older")  # as the kill has left it
    with monkeypatch.context() as patch:
        patch.setattr(merged, "save_file", full)
        with pytest.raises(DiskError, match="No space left"):
            export_merged(str(tiny_model), out, loras=[(name, 0.5)])
    assert (out / merged.RECORD).read_text() == before and not [*tmp_path.glob(".out*")]
    plain = Path.rename

    def broken(self: Path, target: Path) -> Path:
        if self.name == f".out.tmp-{os.getpid()}" and Path(target) == out:
            raise KeyboardInterrupt
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", broken)
        with pytest.raises(KeyboardInterrupt):
            export_merged(str(tiny_model), out, loras=[(name, 0.5)])
    assert (out / merged.RECORD).read_text() == before and not [*tmp_path.glob(".out*")]


def test_what_does_not_fit_is_refused_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    foreign = lora(tiny_sd(tmp_path / "sd"), tmp_path / "foreign")
    own = lora(tiny_model, tmp_path / "own")
    with pytest.raises(UserError, match="is of no part of the pipeline of SD3"):
        export_merged(str(tiny_model), tmp_path / "out", loras=[(foreign, 1.0)])
    with pytest.raises(UserError, match="not empty and no earlier export"):
        export_merged(str(tiny_model), tmp_path / "own", loras=[(own, 1.0)])
    with pytest.raises(UserError, match="name a LoRA with --lora"):
        export_merged(str(tiny_model), tmp_path / "out")
    with pytest.raises(UserError, match="is no run's folder"):
        export_merged(str(tiny_model), tmp_path / "out", loras=[(own, 1.0)], step=3)
    assert not (tmp_path / "out").exists()


def test_memory_is_that_of_one_shard(tmp_path: Path) -> None:
    """Networks of 100 and 400 MB in files of 50 MB: at most three of them (read, changed, written) for both."""

    def memory(kind: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))

    grown: dict[int, int] = {}
    for count in (20, 80):
        model, out = tiny_sd3(tmp_path / f"model-{count}"), tmp_path / f"out-{count}"
        file = model / "transformer/diffusion_pytorch_model.safetensors"
        save_file(load_file(file) | {f"more.{i}.weight": torch.zeros(1250, 1000) for i in range(count)}, file)
        state = {f"more.{i}.lora_A.weight": torch.ones(2, 1000) for i in range(count)}
        state |= {f"more.{i}.lora_B.weight": torch.ones(1250, 2) for i in range(count)}
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free is the system's again
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        merged.merge(str(model), [merged.Weighted("more.lora", state, 0.5, 1.0)], out, shard=50 * 10**6)
        grown[count] = memory("VmHWM") - before
        index = json.loads((out / "transformer/diffusion_pytorch_model.safetensors.index.json").read_text())
        assert len({*index["weight_map"].values()}) == count // 10 + 1
        last = load_file(out / "transformer" / index["weight_map"][f"more.{count - 1}.weight"])
        assert (last[f"more.{count - 1}.weight"] == 1.0).all()
    print(
        "peak memory: " + ", ".join(f"{size / 1e6:.0f} MB of {5 * n} MB in files of 50 MB" for n, size in grown.items())
    )
    assert grown[80] < 200e6 and grown[80] < grown[20] + 60e6
