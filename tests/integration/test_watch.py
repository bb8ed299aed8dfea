"""The live page's server: what it shows of a run that is being written, and requests that it refuses."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import in_thread

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.methods import ballots
from diffrl.methods.groups import ImageGroup, write_groups
from diffrl.records.tracking import save_samples
from diffrl.serving.limits import server_of
from diffrl.watch.server import Settings, make_app, watch

TOKEN = "a token of some length"


def serving(run: Path, **settings: Any) -> AbstractContextManager[str]:
    return in_thread(server_of(make_app(Settings(run, **settings))))


def group(prompt: str = "a red circle <script>alert(1)</script>") -> ImageGroup:
    pixels = torch.randint(0, 256, (4, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return ImageGroup(prompt, pixels, {"clip": [0.1, 0.2, None, 0.4]})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in its third epoch, whose groups wait for votes."""
    folder = tmp_path_factory.mktemp("runs") / "my <run>"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: playground\nepochs: 9\nrewards: {clip: {}, votes: {}}\n")
    rows = [{"epoch": i, "step": i, "samples": 96 * i, "reward/clip": 0.1 * i, "eval/clip": 0.2, "seconds": 3.0,
             "eval/diversity": 0.4} for i in range(3)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_samples(folder, 0, torch.rand(1, 3, 8, 8), ["a red circle"], [0])
    write_groups(folder, "groups", 2, [group()])
    ballots.ask(folder, 3, [group()], time.time() + 600)
    (folder.parent / "secret.png").write_bytes(b"secret")
    return folder


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    with serving(run, read_limit=1.0) as url:
        yield url


def get(url: str, path: str, **headers: str) -> httpx.Response:
    return httpx.get(url + path, headers=headers, trust_env=False, timeout=60)


def post(url: str, path: str, content: Any, **headers: str) -> httpx.Response:
    return httpx.post(url + path, json=content, headers=headers, trust_env=False, timeout=60)


def ballot(**changes: Any) -> dict[str, Any]:
    return {"vote": "0a" * 8, "voter": "0b" * 8, "group": group().identity, "order": [[2], [0]], **changes}


def test_what_it_shows_and_how_it_escapes(run: Path, url: str, charts: None) -> None:
    answer = get(url, "/")
    assert answer.status_code == 200 and "my &lt;run&gt;" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert get(url, "/watch.js").headers["content-type"].startswith("text/javascript")
    state = get(url, "/state").json()
    assert state["asked"]["epoch"] == 3 and 500 < state["asked"]["left"] <= 600
    parts = {name: get(url, f"/parts/{name}").text for name in state["parts"]}
    assert "<svg" in parts["run"] and "stopped: 2 of 9 epochs" in parts["run"]
    (run / ".lock").touch()
    assert "running: 2 of 9 epochs" in get(url, "/parts/run").text
    year = time.time() + 365 * 86400
    os.utime(run / ".lock", (year, year))  # of a run that was killed before the clock went back
    assert "stopped: 2 of 9 epochs" in get(url, "/parts/run").text
    (run / ".lock").unlink()
    assert "clip 0.1" in parts["groups"] and "epoch 2" in parts["groups"]
    assert "data:image/png" in parts["samples"] and 'class="choice"' in parts["votes"]
    assert not any("<script>" in text for text in parts.values())
    picture = get(url, f"/pictures/groups/2/{group().files[0]}")
    assert picture.headers["content-type"] == "image/png" and picture.content[:4] == b"\x89PNG"


def test_lines_and_files_that_are_being_written(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("epochs: 9\n")
    with serving(tmp_path) as url:
        assert "No epoch has ended yet" in get(url, "/parts/run").text
        assert "tracking.groups" in get(url, "/parts/groups").text and get(url, "/parts/votes").text == ""
        metrics = tmp_path / "metrics.jsonl"
        metrics.write_text('{"epoch": 0, "samples": 0, "eval/clip": 0.2}\n{"epoch": 1, "sam')
        before = get(url, "/state").json()["parts"]["run"]
        assert "0 of 9 epochs" in get(url, "/parts/run").text
        with metrics.open("a") as stream:
            stream.write('ples": 9, "eval/clip": 0.3}\n')
        assert get(url, "/state").json()["parts"]["run"] != before
        assert "1 of 9 epochs" in get(url, "/parts/run").text
        metrics.write_text('{"epoch": 0}\n{{{\n{"epoch": 1}\n')
        assert "metrics.jsonl, line 2" in get(url, "/parts/run").text
        write_groups(tmp_path, "groups", 1, [group()])
        index = tmp_path / "groups" / "epoch-0001" / "groups.json"
        whole = index.read_text()
        for text in (whole[:40], "[]", '{"groups": [1, {"group": 2}]}', whole.replace(".png", ".png/../x")):
            index.write_text(text)
            assert "tracking.groups" in get(url, "/parts/groups").text


def test_no_file_but_pictures_of_groups(run: Path, url: str) -> None:
    name = group().files[0]
    folder = run / "groups" / "epoch-0002"
    link, pipe, outside = (folder / f"{'0' * 11}{i}-00.png" for i in range(3))
    link.symlink_to(run / "config.yaml")
    os.mkfifo(pipe)
    outside.symlink_to(run.parent / "secret.png")
    (run / "groups" / "epoch-0009").symlink_to(folder)
    paths = [f"groups/2/{one.name}" for one in (link, pipe, outside)]
    paths += [f"groups/9/{name}", f"samples/0/{name}", "groups/2/groups.json", "groups/2/../../config.yaml"]
    paths += ["groups/2/..%2f..%2fconfig.yaml", "groups/%2e%2e/config.yaml", f"groups/-2/{name}", f"groups/2/{name}%00"]
    paths += [f"groups/{'9' * 10}/{name}", f"../groups/2/{name}", "groups/2/%2fetc%2fpasswd", f"/groups/2/{name}"]
    for path in paths:
        answer = get(url, f"/pictures/{path}")
        assert answer.status_code == 404, path
    assert get(url, "/parts/none").status_code == 404 and get(url, "/parts/..%2f").status_code == 404


def test_pages_of_other_sites_neither_read_nor_vote(run: Path, url: str) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "a:b:c"):  # DNS rebinding
        assert get(url, "/", Host=host).status_code in (400, 421), host
        assert post(url, "/votes", ballot(), Host=host).status_code in (400, 421), host
    for host in ("localhost", "localhost:1234", "127.0.0.1", "[::1]:80"):  # a forwarded port
        assert get(url, "/state", Host=host).status_code == 200
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
                    {"Origin": "http://127.0.0.1:1"}, {"Sec-Fetch-Site": "same-site"}):  # fmt: skip
        for path in ("/votes", "/go-on", "/enter"):
            assert post(url, path, ballot(), **headers).status_code == 403, headers
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):  # what a form can send
        content = json.dumps(ballot())
        answer = httpx.post(url + "/votes", content=content, headers={"Content-Type": kind}, trust_env=False)
        assert answer.status_code == 415
    assert get(url, "/votes").status_code == 405
    assert ballots.read_votes(run) == []


BAD = [
    (422, {"order": [[9999999999], []]}),
    (422, {"order": "0"}),
    (422, {"order": []}),
    (422, {"order": [[True]]}),
    (422, {"order": [[0.5]]}),
    (422, {"order": [list(range(1001))]}),
    (422, {"vote": "x"}),
    (422, {"voter": "../../etc"}),
    (422, {"group": None}),
    (409, {"group": "0" * 12}),
    (409, {"order": [[4]]}),
    (409, {"order": [[-1]]}),
    (409, {"order": [[0], [0]]}),
]


@pytest.mark.parametrize(("status", "changes"), BAD, ids=[f"{status} {str(c)[:40]}" for status, c in BAD])
def test_votes_that_are_refused(run: Path, url: str, status: int, changes: dict[str, Any]) -> None:
    before = len(ballots.read_votes(run))
    answer = post(url, "/votes", ballot(vote="0c" * 8, voter="0d" * 8) | changes)
    assert answer.status_code == status and answer.json()["error"] and "\n" not in answer.json()["error"]
    assert len(ballots.read_votes(run)) == before


def test_broken_bodies_slow_clients_and_a_good_vote(run: Path, url: str) -> None:
    kind = {"Content-Type": "application/json"}
    sent = [(400, b"{"), (400, b"[" * 50_000), (422, b"[]"), (413, b" " * 70_000), (400, b"\xff\xfe")]
    for status, content in sent:
        answer = httpx.post(url + "/votes", content=content, headers=kind, trust_env=False)
        assert answer.status_code == status, content[:10]
    assert httpx.post(url + "/votes", content=iter([b"{}"]), headers=kind, trust_env=False).status_code == 411
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /votes HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=20) as slow:
        slow.sendall(head + b"Content-Length: 9000\r\n\r\n{")
        assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
    assert post(url, "/votes", ballot(), Origin=url).json() == {"kept": True, "new": True}
    assert post(url, "/votes", ballot()).json() == {"kept": True, "new": False}
    assert post(url, "/votes", ballot(vote="0e" * 8)).status_code == 409  # the same person once more
    assert [one["scores"] for one in ballots.read_votes(run)] == [{"preference": [1, 0, 2, 0]}]
    assert (
        post(url, "/go-on", {"epoch": "3"}).status_code == 422 and post(url, "/go-on", {"epoch": 2}).status_code == 409
    )
    assert post(url, "/go-on", {"epoch": 3}).status_code == 200 and ballots.may_go_on(run, 3)


def test_the_token(run: Path) -> None:
    with serving(run, token=TOKEN, host="0.0.0.0") as url:
        closed = get(url, "/")
        assert closed.status_code == 401 and 'id="enter"' in closed.text and "data-part" not in closed.text
        name = group().files[0]
        for path in ("/state", "/parts/votes", f"/pictures/groups/2/{name}"):
            for headers in ({}, {"Authorization": "Bearer x"}, {"Cookie": "diffrl-watch=x"}):
                assert get(url, path, **headers).status_code == 401
        assert post(url, "/votes", ballot()).status_code == 401
        for given in ({"token": "x"}, {"token": 1}, {}):
            assert post(url, "/enter", given).status_code == 401
        assert get(url, "/state", Authorization=f"Bearer {TOKEN}", Host="node7:8800").status_code == 200
        answer = post(url, "/enter", {"token": TOKEN})
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and TOKEN not in cookie
        assert get(url, "/state", Cookie=cookie.partition(";")[0]).status_code == 200
        crossed = post(url, "/votes", ballot(), Cookie=cookie.partition(";")[0], Origin="http://evil.example")
        assert crossed.status_code == 403


def test_the_command_refuses_in_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [([str(run) + "x"], "no folder"), ([str(run.parent)], "not a run's folder"), ([], "RUN_DIR"),
             ([str(run), "--host", "0.0.0.0"], "give a --token-file"), ([str(run), "--port", "99999"], "at most 65535"),
             ([str(run), "--token-file", "/no"], "cannot be read"), ([str(run), "--prot", "1"], "--port")]  # fmt: skip
    for words, said in wrong:
        assert main(["watch", *words]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
    with pytest.raises(UserError, match="reachable from other machines"):
        watch(Settings(run, "0.0.0.0"), 0, print)
