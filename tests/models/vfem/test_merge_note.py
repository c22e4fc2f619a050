"""The note on merged patterns: entities that count as missing by site, and the cost."""

from __future__ import annotations

import re

import fedstat as fs


def test_the_note_counts_by_site_what_counts_as_missing():
    tables = fs.datasets.load_sme()
    partition = fs.ClientPartition.from_frames(tables, on="enterprise_id")
    fit = fs.VFEMRegression.from_formula("NPGR ~ .", partition).fit()
    text = " ".join(fit.notes)
    found = {
        site: (int(lost.replace(",", "")), int(n.replace(",", "")), int(cost))
        for lost, n, site, cost in re.findall(r"([\d,]+) of ([\d,]+) at '([^']+)' \((\d+) %\)", text)
    }
    # Of the patterns that were released, and the tables themselves.
    moments = fit.exchange.moments
    used = {site: int(moments.n_seen[k]) for k, site in enumerate(moments.sites)}
    for site, seen in fit.exchange.released.items():
        lost = len(seen) - used[site]
        if lost:
            assert found.pop(site) == (lost, len(seen), round(100 * ((len(seen) / used[site]) ** 0.5 - 1)))
    assert not found and "Judicial Organ" in text
