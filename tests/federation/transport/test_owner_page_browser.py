"""The owner's page in a real browser: opened once, a plan read and approved by clicks, nothing runs in it."""

from __future__ import annotations

import getpass
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from browser import FOUND, browsing
from paged import make_site, page_of, propose

from fedstat.federation.transport.site_folder import open_site

pytestmark = pytest.mark.skipif(not FOUND, reason="needs Chromium or Chrome")


@contextmanager
def listening():
    """Another server on this machine, and all requests that it receives."""
    heard = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append(f"{self.requestline} {self.headers}")
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<p>hello</p>")

        def log_message(self, *given):
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", heard
        finally:
            server.shutdown()
            thread.join()


def test_an_owner_approves_by_clicks(tmp_path):
    folder = make_site(tmp_path)
    hostile = propose(folder, "age ~ <script>document.title = 'run'</script>", "<img src=x onerror=alert(1)>")
    wanted = propose(folder, "age ~ sex")
    file = tmp_path / "opening.html"
    with page_of(folder) as server, browsing(tmp_path / "browser") as browser:
        # as '--open' does: from a file, after which a strict cookie has to be sent
        file.write_text(f'<meta http-equiv="refresh" content="0; url={server.address}">')
        browser.open(file.as_uri())
        browser.wait_for("Waiting for you")
        browser.open(f"http://{server.host}{server.root}plans")
        assert "<script>" in browser.text and browser.find("document.images.length") == 0
        assert browser.find("document.title") == "Plans - A"
        # the style is taken, by the policy of what may be loaded
        assert browser.find("getComputedStyle(document.querySelector('header')).display") == "flex"
        assert browser.find("document.cookie") == ""
        # a server of another account on this machine is not sent what opens the page: cookies know no ports
        with listening() as (address, heard):
            browser.open(f"{address}/")
            browser.open(f"http://{server.host}{server.root}plans")
        assert heard and not any(server.cookie in said for said in heard)
        browser.click(f"a[href$='{wanted}']")
        browser.wait_for("Technical details of the plan")
        browser.click("a.approve")
        browser.wait_for("cannot be undone")
        assert wanted in browser.text
        browser.click("button.approve")
        browser.wait_for("the site enters it into its ledger")
        assert browser.find("location.pathname") == f"{server.root}plans"
        assert hostile[:12] in browser.text.partition("Decided")[0]
    site = open_site(folder)
    try:
        decisions = list(site.site_ledger.decisions.values())
        assert [(one.plan, one.verdict, one.who) for one in decisions] == [
            (wanted, "approved", getpass.getuser())
        ]
    finally:
        site.site_ledger.store.close()
