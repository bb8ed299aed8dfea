"""A small hub on this machine: enough of its HTTP interface for `HfApi.upload_folder` and `snapshot_download`."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
MISSING = {"X_Error_Code": "EntryNotFound"}  # without it the client takes the repository to be missing


class Hub:
    """`files` of its repositories by OWNER/NAME, `private` of those that were made; `broken`: it answers nothing."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.broken = False
        self.url = ""

    def environment(self, home: Path) -> dict[str, str]:
        """With which a process of its own finds it: the client reads the address once."""
        names = {"HF_ENDPOINT": self.url, "HF_TOKEN": "hf_x", "HF_HOME": str(home), "NO_PROXY": "*"}
        return {**names, "HF_HUB_OFFLINE": "0"}


def listed(files: dict[str, bytes], below: str, deep: bool) -> list[dict[str, Any]]:
    """The hub's rows of files and folders in a folder, or of all in all of its folders; a file is no folder."""
    found = dict[str, dict[str, Any]]()
    for name, data in files.items():
        start = f"{below}/" if below else ""
        if not name.startswith(start):
            continue
        first, *rest = name.removeprefix(start).split("/")
        for depth in range(len(rest) if deep else min(len(rest), 1)):
            folder = start + "/".join([first, *rest][: depth + 1])
            found[folder] = {"type": "directory", "path": folder, "oid": "0"}
        if deep or not rest:
            oid = hashlib.sha1(data).hexdigest()
            found[name] = {"type": "file", "path": name, "size": len(data), "oid": oid}
    return list(found.values())


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: Any) -> None: ...

        def answer(self, body: Any, code: int = 200, **headers: str) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            path = urlsplit(self.path).path
            if hub.broken:
                self.answer({"error": "out of order"}, 403)
            elif path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                hub.files.setdefault(name, {})
                hub.private[name] = asked.get("private") or asked.get("visibility") == "private"
                self.answer({"url": f"{hub.url}/{name}"})
            elif "/preupload/" in path:
                asked = json.loads(body)["files"]
                modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
                self.answer({"files": modes})
            elif "/paths-info/" in path:
                wanted = {unquote(pair.partition("=")[2]) for pair in body.decode().split("&")}
                every = listed(hub.files["/".join(path.split("/")[3:5])], "", True)
                self.answer([entry for entry in every if entry["path"] in wanted])
            elif path == "/api/validate-yaml":  # of a model card
                self.answer({"errors": [], "warnings": []})
            else:
                owner, name = path.split("/")[3:5]
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        value = entry["value"]
                        hub.files[f"{owner}/{name}"][value["path"]] = base64.b64decode(value["content"])
                    elif entry["key"] == "deletedFile":
                        del hub.files[f"{owner}/{name}"][entry["value"]["path"]]
                self.answer({"commitUrl": f"{hub.url}/{owner}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).removeprefix("/datasets")
            parts = path.split("/")
            name = "/".join(parts[3:5] if path.startswith("/api/") else parts[1:3])
            files = hub.files.get(name)
            if files is None:
                self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            elif path.startswith("/api/") and "/tree/" in path:
                folder = "/".join(parts[7:])
                tree = listed(files, folder, "recursive=true" in self.path.lower())
                there = tree or not folder
                self.answer(tree) if there else self.answer({"error": "Entry not found"}, 404, **MISSING)
            elif path.startswith("/api/"):
                self.answer({"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]})
            elif (file := "/".join(parts[5:])) not in files:
                self.answer({"error": "Entry not found"}, 404, **MISSING)
            else:
                data = files[file]
                etag = f'"{hashlib.sha1(data).hexdigest()}"'
                self.answer(data, ETag=etag, X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
