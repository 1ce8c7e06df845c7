"""A headless Chromium whose user is a test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kit.waits import eventually

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1000"),
)


class Tab:
    """A page whose browser is driven over a pipe, by Chrome's protocol for developers; ``requested`` are its URLs."""

    def __init__(self, directory: Path) -> None:
        theirs_in, self._send = os.pipe()
        self._receive, theirs_out = os.pipe()
        # What the browser reads and writes has to be 3 and 4.
        command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", str(CHROMIUM), *FLAGS]
        command += [f"--user-data-dir={directory}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
        for descriptor in (theirs_in, theirs_out):
            os.close(descriptor)
        self.requested: list[str] = []
        self._unread, self._calls, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._calls, "method": method, "params": params, **session}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("method") == "Network.requestWillBeSent":
                self.requested.append(heard["params"]["request"]["url"])
            if heard.get("id") == self._calls:
                assert "error" not in heard, heard
                result: dict[str, Any] = heard["result"]
                return result

    def _hear(self) -> Any:
        while b"\0" not in self._unread:
            received = os.read(self._receive, 2**16)
            assert received, "the browser has ended"
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\0")
        return json.loads(line)

    def open(self, url: str, width: int = 1200, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && document.getElementById('code')?.children.length === 3")

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        eventually(lambda: self.value(expression), f"never: {expression}")

    def choose(self, selector: str, file: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "ArrowDown": 40}
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._send)
        os.close(self._receive)
