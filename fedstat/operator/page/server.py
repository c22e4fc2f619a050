"""The HTTP server of the owner's page: loopback only, for one browser.

A user of this page can approve releases. Therefore:

* The server binds 127.0.0.1 and answers no other host name, by which a page elsewhere could reach it.
* A token on the owner's terminal opens the page once and sets a cookie. The path is random too: cookies do
  not distinguish ports, so another server on this machine would otherwise receive the cookie.
* A GET request changes nothing. A decision is a POST request with a token for this plan and this decision,
  sent from a page of this server that explains its meaning.
* The browser stores nothing and runs no script. Pages load nothing from elsewhere and cannot be framed.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import signal
import socketserver
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from fedstat.errors import EngineError, FedstatError, PartitionError
from fedstat.federation.audit.checkpoints import utc_text
from fedstat.federation.crypto.keys import encode_parts
from fedstat.federation.files import write_atomic
from fedstat.operator.page import views
from fedstat.operator.page.federation_view import FederationView, federation_page
from fedstat.operator.page.owner_view import OwnerView
from fedstat.operator.page.rendering import PAGES, environment, render

LOOPBACK = "127.0.0.1"
COOKIE, ENTRY, OPENING = "fedstat", "/enter", "page.html"
MOST_BYTES, MOST_THREADS, PATIENCE = 2048, 32, 20.0
"""Largest body of a decision in bytes; most connections at a time; time limit of one in seconds."""
DIGEST = "[0-9a-f]{64}"
HEADERS: dict[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
CLOSED = (
    "This page is for the person who started it. Open the address that the command 'page' printed. The "
    "address works once, in one browser. For a new one, start the command again."
)
PageView: TypeAlias = OwnerView | FederationView
View: TypeAlias = Callable[..., views.PageData]
ROUTES: tuple[tuple[str, str, str, View, str], ...] = (
    ("", "", "Overview", views.overview_page, "overview.html"),
    ("plans", "plans", "Plans", views.plans_page, "plans.html"),
    (f"plans/(?P<digest>{DIGEST})", "plans", "Plan of an analysis", views.plan_page, "plan.html"),
    ("ledger", "ledger", "Releases by analysis", views.ledger_page, "ledger.html"),
    (r"ledger/(?P<month>\d{4}-\d{2})", "ledger", "Releases by analysis", views.ledger_page, "ledger.html"),
    (
        r"ledger/(?P<ordinal>\d{1,9})",
        "ledger",
        "Releases of one session",
        views.session_page,
        "session.html",
    ),
    ("columns", "columns", "Releases by column", views.columns_page, "columns.html"),
    (r"columns/(?P<ordinal>\d{1,6})", "columns", "Releases about a column", views.column_page, "column.html"),
    ("exposure", "exposure", "Exposure of single rows", views.exposure_page, "exposure.html"),
    ("refusals", "refusals", "Refusals", views.refusals_page, "refusals.html"),
    ("policy", "policy", "Policy", views.policy_page, "policy.html"),
    ("check", "check", "Check", views.check_page, "check.html"),
)
"""Addresses below the root, each with its menu entry, title, data and template."""
FEDERATION_ROUTES: tuple[tuple[str, str, str, View, str], ...] = (
    ("", "", "Sites and analyses", federation_page, "federation.html"),
)
"""The page of a coordinator, which only shows and decides nothing."""
DECISION = re.compile(f"plans/({DIGEST})/({'|'.join(views.ASKED)})")


class PageServer(ThreadingHTTPServer):
    """The pages of one site, for the browser that has the token."""

    daemon_threads = True
    # on other systems than POSIX, two processes could bind the same port
    allow_reuse_address = os.name == "posix"

    def __init__(self, view: PageView, port: int = 0) -> None:
        self.view = view
        is_owners = isinstance(view, OwnerView)
        self.routes = ROUTES if is_owners else FEDERATION_ROUTES
        self.pages = PAGES if is_owners else (("", "Overview"),)
        self.cookie = secrets.token_hex(32)
        self.root = f"/{secrets.token_hex(16)}/"
        self._token: str | None = secrets.token_hex(32)
        self._key = secrets.token_bytes(32)
        self._entering, self._counting, self._connections = threading.Lock(), threading.Lock(), 0
        self.entered: Callable[[], None] = lambda: None
        try:
            super().__init__((LOOPBACK, port), PageHandler)
        except OSError as error:
            raise EngineError(
                f"port {port} of {LOOPBACK} is not available ({error.strerror}); choose another"
            ) from error

    def server_bind(self) -> None:
        """Bind without a lookup of the name of this machine."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, self.socket.getsockname()[1]

    @property
    def host(self) -> str:
        """Host and port, as the browser sends them."""
        return f"{LOOPBACK}:{self.server_port}"

    @property
    def address(self) -> str:
        """The address that the owner opens, once."""
        return f"http://{self.host}{ENTRY}?token={self._token}"

    def enter(self, token: str) -> bool:
        """Use up the token; False if it is wrong or was used before."""
        with self._entering:
            if self._token is None or not _same(self._token, token):
                return False
            self._token = None
        self.entered()
        return True

    def form_token(self, digest: str, word: str) -> str:
        """Return the token of the form for one decision about one plan."""
        return hmac.digest(self._key, encode_parts("decision", digest, word), "sha256").hex()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accept a connection, unless this server has too many; other threads of the process do not count."""
        with self._counting:
            is_full = self._connections >= MOST_THREADS
            self._connections += not is_full
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and make room for another."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._counting:
                self._connections -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections; print other errors on the owner's terminal."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class PageHandler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer
    timeout = PATIENCE

    def version_string(self) -> str:
        """Return no version numbers."""
        return "fedstat"

    def do_GET(self) -> None:
        """Show a page; this changes nothing."""
        path, _, query = self.path.partition("?")
        if not self._addressed():
            self._refuse()
        elif path == ENTRY:
            self._enter(query)
        elif not self._known(path):
            self._refuse()
        else:
            self._show(path.removeprefix(self.server.root))

    def do_POST(self) -> None:
        """Decide about a plan."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,18}", length) or "Transfer-Encoding" in self.headers:
            return self._report(411, "A length is required.")
        if int(length) > MOST_BYTES:
            return self._report(413, f"At most {MOST_BYTES} bytes are accepted.")
        # read before any reply: unread content would cut the reply short
        body = self.rfile.read(int(length))
        if not (self._addressed() and self._known(self.path) and self._from_here()):
            return self._refuse()
        view, request = self.server.view, DECISION.fullmatch(self.path.removeprefix(self.server.root))
        if request is None or not isinstance(view, OwnerView):
            return self._report(404, "There is no such page.")
        digest, word = request.groups()
        given = parse_qs(body.decode("latin-1")).get("token", [""])
        if len(given) != 1 or not _same(given[0], self.server.form_token(digest, word)):
            return self._refuse()
        try:
            view.decide(digest, views.ASKED[word][0])
        except (FedstatError, OSError) as error:
            code = 404 if isinstance(error, PartitionError) else 409
            problem = {"problem": str(error)}
            return self._page(code, "plans", "Not decided", "frame.html", lambda: problem)
        self.log_message("%s: plan %s", views.ASKED[word][0], digest)
        self._reply(303, b"", Location=f"{self.server.root}plans")
        return None

    def _addressed(self) -> bool:
        """Return whether the request addresses this server by its number, not by a name that leads here."""
        return self.headers.get_all("Host") == [self.server.host]

    def _known(self, path: str) -> bool:
        """Return whether the browser has the cookie and the secret path."""
        server = self.server
        cookies = (
            part.strip().partition("=") for part in ";".join(self.headers.get_all("Cookie", [])).split(";")
        )
        # All cookies are checked: another server on this machine may have set one of the same name.
        mine = [name == COOKIE and _same(value, server.cookie) for name, _, value in cookies]
        return any(mine) and _same(path[: len(server.root)], server.root)

    def _from_here(self) -> bool:
        """Return whether a page of this server sent the form, as far as the browser reports it."""
        origin = self.headers.get_all("Origin", [])
        site = self.headers.get_all("Sec-Fetch-Site", [])
        form = self.headers.get_content_type() == "application/x-www-form-urlencoded"
        return form and origin in ([], [f"http://{self.server.host}"]) and site in ([], ["same-origin"])

    def _enter(self, query: str) -> None:
        if not self.server.enter("".join(parse_qs(query).get("token", []))):
            self._refuse()
            return
        # A redirect would count as coming from the page with the address: a strict cookie would not be sent.
        root = self.server.root
        cookie = f"{COOKIE}={self.server.cookie}; Path={root}; HttpOnly; SameSite=Strict"
        self.log_message("opened in a browser")
        self._reply(200, _encoded(render("entry.html", address=root)), Set_Cookie=cookie)

    def _show(self, path: str) -> None:
        if path == "style.css":
            content = files(views.__package__).joinpath("style.css").read_bytes()
            self._reply(200, content, Content_Type="text/css; charset=utf-8")
            return
        server = self.server
        owner = server.view
        if (request := DECISION.fullmatch(path)) is not None and isinstance(owner, OwnerView):
            digest, word = request.groups()
            token = server.form_token(digest, word)
            title = f"{views.ASKED[word][1]}?"
            return self._page(
                200,
                "plans",
                title,
                "decision.html",
                lambda: views.decision_page(owner, digest, word, token),
            )
        for pattern, here, title, view, template in server.routes:
            if (found := re.fullmatch(pattern, path, re.ASCII)) is not None:
                given = {
                    name: int(text) if name == "ordinal" else text for name, text in found.groupdict().items()
                }
                return self._page(200, here, title, template, partial(view, server.view, **given))
        self._report(404, "There is no such page.")

    def _page(
        self, code: int, here: str, title: str, template: str, read: Callable[[], views.PageData]
    ) -> None:
        """Send a page, or the problem that prevents it."""
        try:
            data = read()
        except (FedstatError, OSError, ImportError) as error:
            code = 404 if isinstance(error, PartitionError) else 500
            template, data = "frame.html", {"problem": str(error)}
        try:
            name = self.server.view.name
        except FedstatError:
            name = self.server.view.folder.name
        given = {"name": name, "root": self.server.root, "pages": self.server.pages}
        page = render(template, here=here, title=title, **given, **data)
        self._reply(code, _encoded(page))

    def _refuse(self) -> None:
        self._report(403, CLOSED)

    def _report(self, code: int, text: str) -> None:
        self._reply(code, _encoded(text + "\n"), Content_Type="text/plain; charset=utf-8")

    def _reply(self, code: int, content: bytes, **headers: str) -> None:
        self.send_response(code)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reported = {"Content-Type": "text/html; charset=utf-8"} | HEADERS | named
        for name, value in {**reported, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a malformed request, or another method."""
        self._report(code, "The request is not valid.")

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log no addresses: they contain the token."""

    def log_message(self, format: str, *given: Any) -> None:  # noqa: A002
        """Print decisions on the owner's terminal."""
        print(f"{utc_text(time.time_ns())} {format % given}", file=sys.stderr, flush=True)


def serve_page(view: PageView, port: int, in_browser: bool) -> int:
    """Serve the page of a folder until SIGTERM or Ctrl-C; SecurityError if others may read the folder."""
    view.check_modes()
    environment()  # raises if jinja2 is missing
    name, opening = view.name, view.folder / OPENING
    with PageServer(view, port) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            # from a thread: it waits until the server in this one has ended
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        server.entered = lambda: opening.unlink(missing_ok=True)
        print(
            f"The page of {name}, for one browser on this machine, until Ctrl-C:\n\n  {server.address}\n",
            flush=True,
        )
        try:
            if in_browser:
                _open(opening, server.address)
            server.serve_forever()
        finally:
            opening.unlink(missing_ok=True)
    print(f"The page of {name} is closed.", flush=True)
    return 0


def _open(path: Path, address: str) -> None:
    """Open the address through a private file: all accounts can see the arguments of a program."""
    write_atomic(path, _encoded(render("entry.html", address=address)))
    webbrowser.open(path.resolve().as_uri())


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _same(one: str, other: str) -> bool:
    """Compare secrets in a time that does not depend on them."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
