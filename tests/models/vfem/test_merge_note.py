"""The note on merged patterns: entities that count as missing by site, and the cost."""

from __future__ import annotations

import re

import numpy as np

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


def test_nothing_is_merged_where_every_policy_allows_small_patterns():
    open_to_all = {"policy": fs.Policy(max_parameters=1000.0, min_count=1), "min_count": 1}
    fits = {}
    for exchange in ("moments", "iterative"):
        partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id", **open_to_all)
        model = fs.VFEMRegression.from_formula("NPGR ~ .", partition, between="independent")
        options = {"iteration": fs.Iteration(tol=1e-10, cross_products="exact")}
        fits[exchange] = model.fit(exchange=exchange, **(options if exchange == "iterative" else {}))
    one, other = fits.values()
    assert "count as missing" not in " ".join(one.notes)
    np.testing.assert_array_less((one.params - other.params).abs() / other.bse, 1e-6)
    np.testing.assert_allclose(one.bse, other.bse, rtol=1e-6)


def test_one_owner_who_allows_no_small_pattern_is_enough_to_merge_them():
    tables = fs.datasets.load_sme()
    loose = fs.Policy(max_parameters=1000.0, min_count=1)
    policies = dict.fromkeys(tables, loose) | {"Judicial Organ": fs.Policy()}
    partition = fs.ClientPartition.from_frames(tables, on="enterprise_id", policies=policies, min_count=1)
    fit = fs.VFEMRegression.from_formula("NPGR ~ .", partition).fit()
    assert fit.exchange.plan.moved > 50
