"""The owner's page of a site whose folder the command made, in this process, and a browser of few words."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pandas as pd
from operating import make_federation

from fedstat.federation.disclosure.approval import AnalysisPlan, PlannedStep, ReleasedArray
from fedstat.federation.disclosure.policy import Policy
from fedstat.operator.page.server import PageServer
from fedstat.operator.service import owner_view

RECORDS = pd.DataFrame({"age": [61.25, 47.5, 55.75, 70.125, 39.0, 58.0], "sex": list("fmfmfm")})


def make_site(home: Path, policy: Policy | None = None) -> Path:
    """Make the folder of site A, which is not served."""
    strict = Policy.strict(approval="owner") if policy is None else policy
    make_federation(home, {"A": RECORDS, "B": RECORDS}, policy=strict)
    return home / "A"


def propose(folder: Path, formula: str = "age ~ sex", call: str = "GLORE.fit()") -> str:
    """Let a plan wait, as a coordinator would word it; its digest."""
    sums = ReleasedArray("gradient", "aggregate", "sums of the score", True, 2, 6)
    step = PlannedStep("glore", "score", 8, True, ("{}",), (sums,))
    plan = AnalysisPlan("A", call, formula, "binomial", ("age", "sex"), (step,), 9, ("Sums over sites.",))
    owner_view(folder).plans.keep(plan.digest, plan)
    return plan.digest


@dataclass
class Answered:
    """Answer of the server."""

    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Visitor:
    """Asks a server, with the cookie that it was given."""

    server: PageServer
    cookies: dict[str, str] = field(default_factory=dict)

    def request(
        self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None
    ) -> Answered:
        """Send a plain HTTP request; `headers` replace those of a browser."""
        port = self.server.server_port
        reported = {"Host": f"127.0.0.1:{port}", **self.cookies}
        if method == "POST":
            reported |= {
                "Content-Type": "application/x-www-form-urlencoded",
                "Origin": f"http://127.0.0.1:{port}",
                "Sec-Fetch-Site": "same-origin",
                "Content-Length": str(len(body or "")),
            }
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in (reported | (headers or {})).items():
                connection.putheader(name, value)
            connection.endheaders((body or "").encode())
            found: HTTPResponse = connection.getresponse()
            return Answered(found.status, dict(found.getheaders()), found.read().decode())
        finally:
            connection.close()

    def enter(self, address: str) -> Answered:
        """Open the address of the terminal."""
        parts = urlsplit(address)
        found = self.request("GET", f"{parts.path}?{parts.query}")
        if found.status == 200:
            self.cookies["Cookie"] = found.headers["Set-Cookie"].partition(";")[0]
        return found

    def get(self, page: str, **headers: str) -> Answered:
        """Open a page below the root."""
        return self.request("GET", self.server.root + page, headers=headers)

    def token(self, page: str) -> str:
        """Read the token of a form on a page."""
        return re.search(r'name="token" value="([0-9a-f]+)"', self.get(page).text)[1]

    def post(self, page: str, token: str, headers: dict[str, str] | None = None) -> Answered:
        """Send the form of a page."""
        return self.request("POST", self.server.root + page, urlencode({"token": token}), headers)


@contextmanager
def page_of(folder: Path) -> Iterator[PageServer]:
    """Serve the page of a folder to everybody who has its address."""
    with PageServer(owner_view(folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def owner_of(folder: Path) -> Iterator[Visitor]:
    """The owner, whose browser was let in."""
    with page_of(folder) as server:
        owner = Visitor(server)
        assert owner.enter(server.address).status == 200
        yield owner
