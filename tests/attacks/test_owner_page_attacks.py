"""Attacks on the owner's page: other accounts, other pages of a browser, other names, a plan's own words."""

from __future__ import annotations

import socket
from urllib.parse import urlencode

import pytest
from paged import Visitor, make_site, owner_of, page_of, propose

from fedstat.operator.service import owner_view

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u202e&amp;"
NO_REQUESTS = (
    b"\0\xff\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 70000 + b"\r\n",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_site(tmp_path_factory.mktemp("page_attacked"))


@pytest.fixture
def owner(folder):
    with owner_of(folder) as owner:
        yield owner


def nothing_decided(folder):
    return not list(owner_view(folder).plans.decided()) and not owner_view(folder).site_ledger.decisions


def test_without_the_token_nothing_is_shown(folder):
    digest = propose(folder)
    with page_of(folder) as server:
        other = Visitor(server)
        for path in ("/", "/plans", "/enter", "/enter?token=", "/enter?token=" + "0" * 64, server.root):
            found = other.request("GET", path)
            assert found.status == 403 and digest[:12] not in found.text and "Set-Cookie" not in found.headers
        # who knows the path, and not the cookie
        assert other.post(f"plans/{digest}/approve", server.form_token(digest, "approve")).status == 403
        other.cookies["Cookie"] = "fedstat=" + "0" * 64
        assert other.get("plans").status == 403
        # wrong guesses do not use up the token of the owner
        assert Visitor(server).enter(server.address).status == 200
    assert nothing_decided(folder)


def test_the_token_serves_once(folder):
    with page_of(folder) as server:
        address = server.address
        first = Visitor(server).enter(address)
        assert first.status == 200 and Visitor(server).enter(address).status == 403
        cookie = first.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and f"Path={server.root}" in cookie


def test_the_cookie_alone_is_not_enough_and_is_not_sent_to_other_ports(owner):
    """Cookies know no ports: a server of another account on this machine must not be handed this one."""
    assert owner.get("plans").status == 200
    for path in ("/", "/plans", "/" + "0" * 32 + "/plans", owner.server.root[:-1]):
        assert owner.request("GET", path).status == 403
    # a cookie of the same name that another server has set does not lock the owner out
    mine = owner.cookies["Cookie"]
    assert owner.get("plans", Cookie=f"fedstat=planted; {mine}").status == 200


HOSTS = ("evil.example", "localhost", "127.0.0.1", "127.0.0.1:1", "", "[::1]:{port}")


@pytest.mark.parametrize("host", HOSTS)
def test_another_name_that_leads_here_is_refused(folder, owner, host):
    digest = propose(folder, f"age ~ {host}")
    page = f"plans/{digest}/approve"
    token, host = owner.token(page), host.format(port=owner.server.server_port)
    assert owner.get("", Host=host).status == 403
    assert owner.post(page, token, {"Host": host}).status == 403
    assert nothing_decided(folder)


def test_a_rebound_name_does_not_use_up_the_token(folder):
    with page_of(folder) as server:
        address = server.address.removeprefix(f"http://{server.host}")
        assert Visitor(server).request("GET", address, headers={"Host": "evil.example"}).status == 403
        assert Visitor(server).enter(server.address).status == 200


def test_looking_decides_nothing(folder, owner):
    digest = propose(folder)
    page = f"plans/{digest}/approve"
    token = owner.token(page)
    for path in (page, f"{page}?{urlencode({'token': token})}"):
        owner.get(path)
    for method in ("PUT", "DELETE", "HEAD", "OPTIONS", "get"):
        assert owner.request(method, owner.server.root + page).status in (403, 404, 405, 501)
    assert nothing_decided(folder)


def test_a_form_of_another_page_is_refused(folder, owner):
    digest, other = propose(folder), propose(folder, "age ~ 0 + sex")
    page = f"plans/{digest}/approve"
    token = owner.token(page)
    wrong = [
        ({}, ""),
        ({}, "0" * 64),
        ({}, owner.token(f"plans/{digest}/deny")),
        ({}, owner.token(f"plans/{other}/approve")),
        ({"Origin": "http://evil.example"}, token),
        ({"Origin": "null"}, token),
        ({"Origin": f"http://127.0.0.1:{owner.server.server_port + 1}"}, token),
        ({"Sec-Fetch-Site": "cross-site"}, token),
        ({"Sec-Fetch-Site": "same-site"}, token),
        ({"Content-Type": "text/plain"}, token),
    ]
    for headers, given in wrong:
        assert owner.post(page, given, headers).status == 403, headers
    assert nothing_decided(folder)


def test_no_path_leads_out(folder, owner):
    for path in (
        "../identity.json",
        "../../A/identity.json",
        "..%2f..%2fidentity.json",
        "style.css/../../identity.json",
        "plans/../../identity",
        "plans/" + "0" * 63 + ".",
        "ledger/../identity.json",
        "ledger/999999999",
        "ledger/9999-99",
        "ledger/%D9%A3",
        "/etc/passwd",
        "identity.json",
        "plans/" + "0" * 64,
    ):
        found = owner.request("GET", owner.server.root + path)
        assert found.status in (200, 403, 404), path
        assert "signing" not in found.text and "root:" not in found.text


def test_a_large_or_endless_body_is_not_read(folder, owner):
    page = owner.server.root + "plans/" + "0" * 64 + "/approve"
    for headers, status in (
        ({"Content-Length": "1000000000"}, 413),
        ({"Content-Length": "2049"}, 413),
        ({"Content-Length": "-1"}, 411),
        ({"Content-Length": "x"}, 411),
        ({"Transfer-Encoding": "chunked"}, 411),
    ):
        assert owner.request("POST", page, "", headers).status == status
    owner.request("POST", page, "token=%ff%00&token=&" + "a=1&" * 300)
    assert owner.get("").status == 200


def test_what_is_no_request_ends_nothing(owner):
    for raw in NO_REQUESTS:
        with socket.create_connection(("127.0.0.1", owner.server.server_port), 60) as line:
            line.sendall(raw)
            line.shutdown(socket.SHUT_WR)
            try:
                while line.recv(4096):
                    pass
            except ConnectionError:
                pass
    assert owner.get("").status == 200


def test_the_words_of_a_plan_are_no_html(folder, owner):
    digest = propose(folder, EVIL, EVIL)
    for page in ("", "plans", f"plans/{digest}", f"plans/{digest}/approve"):
        text = owner.get(page).text
        assert "&lt;script&gt;" in text and "\u202e" not in text
        assert "<script" not in text and "<img" not in text and "onerror=alert(1)>" not in text


def test_the_page_listens_on_the_loopback_alone(owner):
    assert owner.server.socket.getsockname()[0] == "127.0.0.1"
