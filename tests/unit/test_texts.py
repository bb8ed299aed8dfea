"""Texts are encoded once: for the whole run where memory holds them, by one process, in files beyond that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import PROMPTS, SPEC
from torch import nn

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.policy import Conditioning, Policy, load_policy, textfiles
from diffrl.policy import text_cache as texts
from diffrl.policy.text_cache import visiting
from diffrl.policy.textfiles import TextFiles
from diffrl.run.device import prepare_engine
from diffrl.run.prefetch import TextPrefetcher
from diffrl.run.train import Run, train


@pytest.fixture(autouse=True)
def a_disk_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textfiles, "LEFT", 0)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str | None]]:
    """How often each prompt went through a text encoder, over all policies."""
    seen: Counter[str | None] = Counter()
    learn = texts.Texts.learn

    def counted(self: Any, *arguments: Any) -> None:
        encode = self.backbone.encode

        def once(prompt: str | None, device: torch.device) -> Conditioning:
            seen[prompt] += 1
            row: Conditioning = encode(prompt, device)
            return row

        self.backbone.encode = once
        try:
            learn(self, *arguments)
        finally:
            del self.backbone.encode

    monkeypatch.setattr(texts.Texts, "learn", counted)
    yield seen


def test_a_run_encodes_everything_once_and_before_it_trains(config_file: Any, encoded: Counter[str | None]) -> None:
    run = Run(load_config(config_file()))
    run.prefetcher.ensure(0)
    assert run.policy.texts.visits == 1
    before = dict(encoded)
    assert set(encoded.values()) == {1} and {p.text for p in run.source.stream.prompts} <= set(encoded)
    run.loop.run_epoch(0)
    run.evaluation.scores()
    run.prefetcher.ensure(1)
    assert encoded == before and run.policy.texts.visits == 1
    assert not (run.folder.path / "texts").exists()
    run.close()


@pytest.mark.long
def test_beyond_main_memory_it_encodes_stretches_into_files(
    config_file: Any, encoded: Counter[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four epochs of one group each, with room for three prompts at a time: all are encoded once, and twice never."""
    config = load_config(
        config_file(rollout={"groups": 1, "group_size": 8}, evaluate={"prompts": 1}),
        ["epochs=4", "tracking.samples=1"],
    )
    policy = load_policy(config.model, lora=SPEC)
    row = policy.backbone.blank(1, torch.float32).nbytes
    monkeypatch.setattr(texts, "CACHE_BYTES", 6 * row)
    folders: list[int] = []
    end = TextPrefetcher.end
    monkeypatch.setattr(
        TextPrefetcher, "end", lambda self: (folders.append(len(list(self.files.folder.iterdir()))), end(self))
    )
    train(config)
    assert set(encoded.values()) == {1} and len(encoded) >= 4
    # A later stretch has no need of the empty prompt's row.
    assert folders == [len(encoded)], "every row is a file until the run has ended"
    assert not (Path(config.run_dir) / "texts").exists()


def process_of(rank: int) -> Any:
    return SimpleNamespace(
        num_processes=2, process_index=rank, is_main_process=rank == 0, wait_for_everyone=lambda: None
    )


def test_two_processes_encode_each_prompt_once(config_file: Any, tmp_path: Path, encoded: Counter[str | None]) -> None:
    run = Run(load_config(config_file()))
    tmp_path.joinpath("shared").mkdir()
    policies = [run.policy, load_policy(run.config.model, lora=SPEC)]
    for rank, policy in enumerate(policies):
        TextPrefetcher(policy, run.source.stream, PROMPTS, 3, process_of(rank), tmp_path / "shared", "key").ensure(0)
    everything = [prompt.text for prompt in run.source.stream.prompts]
    assert set(encoded.values()) == {1} and set(encoded) == {"", *PROMPTS, *everything}
    one, two = (policy.encode(everything) for policy in policies)
    assert torch.equal(one.embeds, two.embeds) and torch.equal(one.pooled, two.pooled)
    assert set(encoded.values()) == {1}, "the second process reads what the first one wrote"
    run.close()


def test_files_are_read_only_where_they_are_whole_and_of_this_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TextFiles(tmp_path, "a")
    row = Conditioning(torch.randn(1, 3, 4), torch.randn(1, 0), torch.tensor([3]), (torch.ones(1, 2),))
    for prompt in ("one", None):
        files.write(prompt, row)
        found = files.read(prompt)
        assert found is not None and found.lengths is not None and found.lengths.tolist() == [3]
        assert torch.equal(found.embeds, row.embeds) and torch.equal(found.extra[0], row.extra[0])
        assert found.pooled.shape == (1, 0)
    assert TextFiles(tmp_path, "b").read("one") is None
    files.path("one").write_bytes(files.path("one").read_bytes()[:50])
    assert files.read("one") is None
    files.write("two", row)
    monkeypatch.setattr(textfiles, "FILES_BYTES", 1)
    files.evict(["two"], row.nbytes)
    assert [file.name for file in tmp_path.iterdir()] == [files.path("two").name]
    monkeypatch.setattr(textfiles, "LEFT", 1 << 60)
    files.write("three", row)
    assert files.read("three") is None, "the disk keeps room for checkpoints"


def test_a_visit_leaves_the_very_tensors_behind() -> None:
    table = nn.Embedding(4, 2)
    module = nn.ModuleList([table, nn.Linear(2, 4, bias=False), nn.BatchNorm1d(2)])
    module[1].weight = table.weight
    before = dict(module.state_dict(keep_vars=True))
    with pytest.raises(RuntimeError, match="inside"), visiting([module], torch.device("meta")):
        assert all(tensor.is_meta for tensor in module.state_dict().values())
        assert module[1].weight is table.weight
        raise RuntimeError("inside")
    assert all(tensor is before[name] for name, tensor in module.state_dict(keep_vars=True).items())


def test_the_network_steps_aside_for_the_encoders_and_decoding_has_its_size(
    config_file: Any, policy: Policy, model: str
) -> None:
    config = load_config(config_file(), ["engine.encoders=apart", "engine.decode=1"])
    expected = policy.encode(PROMPTS)
    apart = load_policy(model, lora=SPEC)
    prepare_engine(config, apart)
    seen: list[str] = []
    network = apart.backbone.network
    network.to = lambda device: seen.append(str(device)) or network  # type: ignore[method-assign,assignment]
    found = apart.encode(PROMPTS)
    assert seen == ["cpu", "cpu"] and torch.equal(found.embeds, expected.embeds)
    shapes: list[int] = []
    apart.vae.decoder.register_forward_pre_hook(lambda _, given: shapes.append(len(given[0])))
    apart.decode(torch.randn(3, *apart.latent_shape))
    assert shapes == [1, 1, 1]
    apart._lockstep = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"engine.encoders: apart moves a whole network, and FSDP2"):
        prepare_engine(config, apart)


def test_a_prompt_that_is_cut_is_said_once_and_in_one_line(
    policy: Policy, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    most = policy.backbone.reader()[1]
    policy.texts.forget()
    for _ in range(2):
        policy.encode(["red " * (most - 2), "red " * 500])
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith('prompt "red red') and f"502 tokens, of which the model reads {most}" in line
    assert len(line) < 160 and "truncated" not in capfd.readouterr().err
