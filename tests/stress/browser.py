"""A headless Chromium over its debugging pipe, without a driver: pages are opened, clicked, asked and photographed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `evaluate` runs JavaScript and returns its value; `click` clicks where a person would."""

    def __init__(self, width: int, height: int = 900) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory()
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        flags += [f"--user-data-dir={self._profile.name}", "--no-first-run", "--disable-background-networking"]

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            os.dup2(to_browser, 13)
            os.dup2(from_browser, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        targets = self._send("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self._send("Page.enable")
        self.size(width, height)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **metrics)

    def open(self, url: str) -> None:
        self._send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, code: str) -> Any:
        answer = self._send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", code))
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.evaluate(condition):
                    return
            except RuntimeError:
                pass  # the page is being replaced
            time.sleep(0.1)
        raise TimeoutError(condition)

    def click(self, code: str) -> None:
        """The element that the expression gives, with the mouse."""
        box = f"(() => {{const e = {code}; e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect(); "
        x, y = self.evaluate(box + "return [b.x + b.width / 2, b.y + b.height / 2];})()")
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self._send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=key)

    def media(self, kind: str) -> None:
        """As on a "screen" or in "print"."""
        self._send("Emulation.setEmulatedMedia", media=kind)

    def picture(self, path: Path, whole: bool = True) -> None:
        answer = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._in, 2**20)
                if not part:
                    raise RuntimeError("the browser has ended")
                self._rest += part
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
