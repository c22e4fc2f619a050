"""Chromium without a window, driven through a pipe by its own protocol; no further package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), "")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
LONGEST = 180.0
START = """
import os, sys
ours = [os.dup(int(number)) for number in sys.argv[1:3]]
while min(ours) < 5:
    ours = [os.dup(number) for number in ours]
for number, where in zip(ours, (3, 4)):
    os.dup2(number, where)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads from file 3 and writes to 4, whatever numbers they have here."""


class BrowserError(Exception):
    """Features of the browser that are switched off, and why."""


class Browser:
    """One page of a browser that was started with its files 3 and 4 as pipes."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb", 0), os.fdopen(back, "rb")
        self._number, self._session = 0, None
        target = self.report("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.report("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.report("Page.enable")

    def report(self, method: str, **given: Any) -> dict[str, Any]:
        """Have something done, and return what came of it."""
        self._number += 1
        said = {"id": self._number, "method": method, "params": given}
        if self._session:
            said["sessionId"] = self._session
        self._to.write(json.dumps(said).encode() + b"\0")
        while (reported := self._read()).get("id") != self._number:
            pass
        if "error" in reported:
            raise BrowserError(f"{method}: {reported['error']}")
        return reported["result"]

    def _read(self) -> dict[str, Any]:
        """Read one message; they end with a zero byte."""
        content = bytearray()
        while (one := self._back.read(1)) != b"\0":
            if not one:
                raise RuntimeError("the browser has ended")
            content += one
        return json.loads(content)

    def open(self, address: str) -> None:
        """Open an address, and wait until it is there."""
        self.report("Page.navigate", url=address)
        self.wait_for("")

    def wait_for(self, words: str) -> None:
        """Wait until a page is there whole and says something, over as many pages as lead there."""
        while self.find("document.readyState") != "complete" or words not in self.text:
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click as a finger does, in the middle of the element."""
        where = self.find(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView();"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            given = {"type": kind, "x": where[0], "y": where[1], "button": "left", "clickCount": 1}
            self.report("Input.dispatchMouseEvent", **given)

    def find(self, expression: str) -> Any:
        """Return the value of an expression in the page; None where it is just left for another."""
        try:
            found = self.report("Runtime.evaluate", expression=expression, returnByValue=True)
        except BrowserError:
            return None
        return found["result"].get("value")

    @property
    def text(self) -> str:
        """Return the text of the page."""
        return self.find("document.body.innerText") or ""

    def picture(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Take a picture of the whole page at a width."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.report("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.report("Emulation.setDeviceMetricsOverride", **size)
        taken = self.report("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browsing(home: Path) -> Iterator[Browser]:
    """Start a browser whose files are in a folder of its own."""
    (theirs_in, to), (back, theirs_out) = os.pipe(), os.pipe()
    start = [sys.executable, "-S", "-c", START, str(theirs_in), str(theirs_out)]
    arguments = [*start, FOUND, *OPTIONS, f"--user-data-dir={home}"]
    with open(home.with_suffix(".log"), "wb") as log:
        process = subprocess.Popen(
            arguments, pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    os.close(theirs_in)
    os.close(theirs_out)
    # one that hangs ends, and with it what waits for its word
    hung = threading.Timer(LONGEST, process.kill)
    hung.start()
    try:
        yield Browser(to, back)
    finally:
        hung.cancel()
        process.kill()
        process.wait()
