"""Five tasks of a data protection officer, from the text that the owner's page shows without unfolding.

They ask for what has left about a column, to whom, under which approval, what a plan would reveal, and how
to stop it.
Set FEDSTAT_PICTURES to a folder to keep pictures of the pages at 1200 and 400 pixels.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from browser import FOUND, browsing
from operating import make_federation
from paged import page_of
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.errors import ConsentError
from fedstat.federation.disclosure.policy import Policy
from fedstat.operator.command_line import main

pytestmark = pytest.mark.skipif(not FOUND, reason="needs Chromium or Chrome")
PICTURES = os.environ.get("FEDSTAT_PICTURES", "")
WHO = {"person": "Dr. Ada Klein", "study": "Blood pressure 2026", "purpose": "Does pressure rise with age?"}


def frame(seed):
    rng = np.random.default_rng(seed)
    age = rng.uniform(30, 80, 200).round(1)
    pressure = (90 + 0.6 * age + rng.normal(0, 12, 200)).round(1)
    return pd.DataFrame({"age": age, "pressure": pressure, "smoker": rng.integers(0, 2, 200)})


class Analyst(Federation):
    """An analyst who states person, study and purpose."""

    def connect(self, journal=None):
        path = self.home / "study" / "federation.toml"
        path.write_text(path.read_text().replace('transport = "folder"', 'transport = "these"'))
        return fs.ClientPartition.connect(path, transport=self, **WHO)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Text of the pages of site B, by name, after an approved analysis and with another one waiting."""
    home = tmp_path_factory.mktemp("five")
    make_federation(
        home, {name: frame(seed) for seed, name in enumerate("ABC")}, policy=Policy.strict(approval="owner")
    )
    for name in "ABC":
        assert main(["site", "describe", str(home / name)]) == 0
    federation = Analyst(home)

    def fit(formula):
        return fs.FederatedOLS.from_formula(formula, federation.connect()).fit(masked=True)

    with pytest.raises(ConsentError):
        fit("pressure ~ age")
    for site in federation.sites.values():
        for digest in list(site.site.pending):
            site.site.approve(digest, "olga")
    assert fit("pressure ~ age").nobs == 600
    with pytest.raises(ConsentError):
        fit("pressure ~ age + smoker")
    (digest,) = federation.sites["B"].site.pending
    for site in federation.sites.values():
        site.site.site_ledger.store.close()
    places = {"overview": "", "columns": "columns", "plan": f"plans/{digest}", "plans": "plans"}
    shown = {}
    with page_of(home / "B") as server, browsing(home / "browser") as browser:
        opening = home / "opening.html"
        opening.write_text(f'<meta http-equiv="refresh" content="0; url={server.address}">')
        browser.open(opening.as_uri())
        browser.wait_for("Waiting for you")
        for name, place in places.items():
            browser.open(f"http://{server.host}{server.root}{place}")
            shown[name] = read(browser, name)
            if name == "columns":
                of_age = "[...document.querySelectorAll('main a')].find(a => a.innerText == 'age').href"
                browser.open(browser.find(of_age))
                shown["column"] = read(browser, "column")
    return shown


def read(browser, name):
    """Text of the page that is open, without what is folded."""
    for width in (1200, 400):
        if PICTURES:
            browser.picture(Path(PICTURES) / f"{name}-{width}.png", width)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.report("Emulation.setDeviceMetricsOverride", **size)
        cut = "[document.documentElement, ...document.querySelectorAll('.wide')]"
        cut += ".filter(e => e.scrollWidth > e.clientWidth).length"
        assert browser.find(cut) == 0, f"something is cut off at {width} pixels on page {name}"
    return " ".join(browser.text.split())


def test_what_left_about_a_column(pages):
    assert "pressure ~ age" in pages["column"] and "sum" in pages["column"]


def test_to_whom(pages):
    for words in WHO.values():
        assert words in pages["column"]


def test_under_which_approval(pages):
    assert "approved" in pages["column"] and "olga" in pages["column"]


def test_what_a_plan_would_reveal(pages):
    for words in ("No row leaves", "sum over 3 sites", *WHO.values(), "How pressure depends on age, smoker"):
        assert words in pages["plan"], words


def test_how_to_stop_it(pages):
    assert "How to stop requests" in pages["overview"]
    assert "Deny" in pages["plan"] and "Approve" in pages["plan"]
