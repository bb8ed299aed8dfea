"""Runs and files at an address of fsspec, against servers of this machine: S3 (moto), Google's, the hub's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import in_child, signal_at
from hub import Hub, serving
from launching import free_port
from safetensors.torch import load_file

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import UserError

pytest.importorskip("s3fs", reason='needs s3fs: pip install "diffrl[s3]"')
moto = pytest.importorskip("moto.server", reason="needs moto[server]")
import fsspec.asyn  # noqa: E402

from diffrl import store  # noqa: E402
from diffrl.pushing import runs  # noqa: E402
from diffrl.pushing.hub import Pusher  # noqa: E402


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of an empty bucket; the current folder is a machine's own."""
    server = moto.ThreadedMotoServer(port=free_port(), verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = f"runs-{uuid.uuid4().hex[:8]}"  # the server keeps what a test before has written
    store.opened(f"s3://{name}")[0].mkdir(name)
    yield f"s3://{name}"
    # A request that is left tries again for a minute, each time with a number of the process's global generator, whose
    # state the runs of the tests after this one compare.
    loop = fsspec.asyn.get_loop()
    asyncio.run_coroutine_threadsafe(ended(), loop).result(60)
    server.stop()


async def ended() -> None:
    """Everything on this loop but this is cancelled, and has ended."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.wait(left, timeout=30) if left else None


def machine(folder: Path, words: list[str], environment: dict[str, str], killed_at: int | None = None) -> None:
    """In a child: `diffrl train WORDS` in a folder of its own; killed when it begins to send so many files."""
    os.environ |= environment
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    if killed_at is not None:
        opened, calls = runs.opened, itertools.count(1)

        def counted(address: str) -> tuple[Any, str]:
            fs, path = opened(address)
            send = fs.put_file

            def put_file(*given: Any, **more: Any) -> Any:
                if next(calls) == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return send(*given, **more)

            fs.put_file = put_file
            return fs, path

        runs.opened = counted
    assert main(["train", *words]) == 0


def lora(folder: Path) -> Any:
    return {name: tensor.tolist() for name, tensor in load_file(folder / "pytorch_lora_weights.safetensors").items()}


@pytest.mark.long
def test_a_run_that_was_killed_while_it_was_sent_goes_on_elsewhere_exactly(
    bucket: str, config_file: Any, tmp_path: Path
) -> None:
    config = str(config_file(epochs=3, evaluate={"every": 3, "prompts": 2, "per_prompt": 2}))
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS", "XDG"))}
    address = f"{bucket}/deep/one"
    assert in_child(machine, tmp_path / "alone", [config], environment) == 0
    plain = lora(tmp_path / "run" / "lora")
    words = [config, f"run_dir={address}", "--resume", "auto"]
    assert in_child(machine, tmp_path / "a", [*words, "epochs=1"], environment) == 0
    sent = runs.current(address)
    assert sent is not None and sent["epoch"] == 1
    assert in_child(machine, tmp_path / "b", words, environment, 3) == -signal.SIGKILL
    after = runs.current(address)
    assert after is not None and after["epoch"] == 1  # what was half sent is not there
    fs, path = store.opened(address)
    assert len(fs.ls(f"{path}/pushes")) == 2
    assert in_child(machine, tmp_path / "c", words, environment) == 0
    assert lora(tmp_path / "c" / "runs" / "one" / "lora") == plain
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "c/runs/one/metrics.jsonl").read_text().splitlines()]
    assert epochs == [0, 1, 2, 3]
    assert (runs.current(address) or {})["epoch"] == 3 and len(fs.ls(f"{path}/pushes")) == 2


def test_a_new_run_where_one_is_and_a_file_that_is_not_what_was_sent_are_refused(
    bucket: str, config_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "config.yaml").write_text("model: playground\n")
    runs.send(f"{bucket}/two", staged, 1)
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(config_file()), f"run_dir={bucket}/two"]) == 2
    assert f"{bucket}/two already holds a run" in capsys.readouterr().err
    fs, path = store.opened(f"{bucket}/two")
    (name,) = fs.find(f"{path}/pushes")
    fs.pipe_file(name, b"model: playgroun?\n")
    with pytest.raises(UserError, match=r"config\.yaml is not what was sent"):
        runs.fetch(f"{bucket}/two", tmp_path / "two")
    assert not (tmp_path / "two").exists()
    with pytest.raises(UserError, match="has no run"):
        runs.fetch(f"{bucket}/three", tmp_path / "three")


def test_models_prompts_and_weights_are_read_from_an_address(
    bucket: str, config_file: Any, tiny_model: Path, tmp_path: Path
) -> None:
    fs, _ = store.opened(bucket)
    fs.put(str(tiny_model), f"{bucket[5:]}/model", recursive=True)
    fs.pipe_file(f"{bucket[5:]}/prompts.txt", b"red a\nred b\nred c\nred d\n")
    sources = {"train": f"{bucket}/prompts.txt", "test": f"{bucket}/prompts.txt"}
    config = load_config(config_file(model=f"{bucket}/model", prompts=sources))
    assert config.model == f"{bucket}/model"
    before = store.local(f"{bucket}/prompts.txt")
    assert store.local(f"{bucket}/prompts.txt") == before and before.read_bytes().startswith(b"red a")
    fs.pipe_file(f"{bucket[5:]}/prompts.txt", b"red e\n")
    assert store.local(f"{bucket}/prompts.txt").read_bytes() == b"red e\n"
    with pytest.raises(UserError, match="there is no such file or folder"):
        store.local(f"{bucket}/nothing")


def test_a_run_at_google_s_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gcsfs", reason='needs gcsfs: pip install "diffrl[gs]"')
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    port = free_port()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="runs")
    server.start()
    try:
        staged = tmp_path / "staged"
        staged.mkdir()
        (staged / "lora.bin").write_bytes(os.urandom(300_000))
        assert runs.current("gs://runs/one") is None
        for epoch in range(1, 4):
            runs.send("gs://runs/one", staged, epoch)
        runs.fetch("gs://runs/one", tmp_path / "one")
        assert (tmp_path / "one" / "lora.bin").read_bytes() == (staged / "lora.bin").read_bytes()
        fs, path = store.opened("gs://runs/one")
        assert len(fs.ls(f"{path}/pushes")) == 2 and store.local("gs://runs/one/current.json").is_file()
    finally:
        server.stop()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with the repository me/runs, for commands in processes of their own."""
    with serving() as server:
        server.files["me/runs"] = {}
        values = server.environment(tmp_path / "home") | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        yield server


def test_a_file_of_the_hub_is_fetched_again_when_it_has_changed(hub: Hub, tmp_path: Path) -> None:
    """Also where its size is the same; a file, and a folder."""
    for text in ("red e", "red f"):
        hub.files["me/runs"]["texts/prompts.txt"] = text.encode()
        for address, name in (("hf://me/runs/texts/prompts.txt", ""), ("hf://me/runs/texts", "prompts.txt")):
            code = f"from diffrl.store import local; print((local({address!r}) / {name!r}).read_text())"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert done.stdout == f"{text}\n", done.stderr


@pytest.mark.long
def test_a_run_at_the_hub_goes_on_elsewhere_exactly(hub: Hub, config_file: Any, tmp_path: Path) -> None:
    config = str(config_file(epochs=2))
    assert in_child(machine, tmp_path / "alone", [config], {}) == 0
    for epochs in (1, 2):
        folder = tmp_path / str(epochs)  # a machine's own
        folder.mkdir()
        words = [config, "run_dir=hf://me/runs/one", "--resume", "auto", f"epochs={epochs}"]
        command = [sys.executable, "-m", "diffrl", "train", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    table = json.loads(hub.files["me/runs"]["one/current.json"])
    sent = tmp_path / "sent.safetensors"
    name = f"one/pushes/{table['push']}/lora/pytorch_lora_weights.safetensors"
    sent.write_bytes(hub.files["me/runs"][name])
    plain = load_file(tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors")
    assert table["epoch"] == 2
    assert {k: v.tolist() for k, v in load_file(sent).items()} == {k: v.tolist() for k, v in plain.items()}


def test_a_kind_of_address_that_is_none_is_one_line() -> None:
    for address in ("s4://bucket/name", "gdrive://bucket/name"):
        with pytest.raises(UserError, match=address) as error:
            store.local(address)
        assert "\n" not in str(error.value)


class Faulty(socketserver.ThreadingTCPServer):
    """In front of a store: of three connections one is closed unheard, one is busy (503), one breaks off in what it
    answers or, later, is let through; until `healthy`."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, behind: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), None)  # type: ignore[arg-type]
        self.behind, self.count, self.faults, self.stuck = behind, 0, 0, False

    def finish_request(self, request: Any, address: Any) -> None:
        self.count += 1
        kind = self.count % 4
        if self.stuck:
            time.sleep(60)
        elif kind == 1:
            self.faults += 1
        elif kind == 2:
            self.faults += 1
            request.recv(65536)
            request.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            self.faults += kind == 3
            with socket.create_connection(self.behind) as onward:
                sending = threading.Thread(target=_pipe, args=(request, onward, None), daemon=True)
                sending.start()
                _pipe(onward, request, 30_000 if kind == 3 else None)  # kind 3 breaks off in a file


def _pipe(source: socket.socket, target: socket.socket, most: int | None) -> None:
    with contextlib.suppress(OSError):
        passed = 0
        while (data := source.recv(8192)) and (most is None or passed < most):
            passed += len(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def faulty(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    host, port = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").split(":")
    with Faulty((host, int(port))) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
        monkeypatch.setattr(store, "PAUSES", (0.05,) * 8)
        yield proxy
        proxy.shutdown()


def test_connections_that_fail_are_tried_again_and_what_arrives_is_whole(
    bucket: str, faulty: Faulty, tmp_path: Path
) -> None:
    staged = tmp_path / "staged"
    (staged / "lora").mkdir(parents=True)
    for name, size in {"config.yaml": 100, "lora/big.safetensors": 400_000, "metrics.jsonl": 0}.items():
        (staged / name).write_bytes(os.urandom(size))
    runs.send(f"{bucket}/four", staged, 7)
    runs.fetch(f"{bucket}/four", tmp_path / "four")
    for file in (file for file in staged.rglob("*") if file.is_file()):
        assert (tmp_path / "four" / file.relative_to(staged)).read_bytes() == file.read_bytes()
    assert faulty.faults > 5


def test_a_store_that_is_stuck_holds_no_ending_run_longer_than_it_was_given(
    bucket: str, faulty: Faulty, tmp_path: Path
) -> None:
    faulty.stuck, said = True, list[str]()
    pusher = Pusher(tmp_path, f"{bucket}/five", said.append)
    pusher.push(3)
    begun = time.monotonic()
    pusher.wait(0.5)
    assert time.monotonic() - begun < 3 and "was not sent" in said[0] and pusher.sent is None


@pytest.mark.long
def test_what_a_signal_saves_last_is_sent(bucket: str, config_file: Any, tmp_path: Path) -> None:
    """Checkpoints come every 3 epochs; the signal in the second one saves, and sends, the first one's end."""
    config = str(config_file(epochs=3, evaluate={"every": 3, "prompts": 2, "per_prompt": 2}, checkpoint={"every": 3}))
    environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS", "XDG"))}
    address = f"{bucket}/six"
    assert in_child(warned, tmp_path / "a", [config, f"run_dir={address}"], environment) == 75
    assert (runs.current(address) or {})["epoch"] == 1
    assert in_child(machine, tmp_path / "b", [config, f"run_dir={address}", "--resume", "auto"], environment) == 0
    assert (runs.current(address) or {})["epoch"] == 3


def warned(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """In a child: the run gets SIGTERM in its second epoch."""
    os.environ |= environment
    folder.mkdir()
    os.chdir(folder)
    signal_at("diffrl.run.run:Run.begin_epoch", 2, signal.SIGTERM)
    os._exit(main(["train", *words]))
