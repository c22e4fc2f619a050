"""Groups that cut one another: single rows from several honest fits, and from powers of a few rows."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from wiretap import tapped

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.disclosure.policy import Policy

pytestmark = pytest.mark.filterwarnings("ignore")

CLIENTS = ("a", "b", "c", "d")


def institutions(n=400):
    """Four institutions, each of which lacks some entities; at one of them one more than at another."""
    rng = np.random.default_rng(5)
    k = np.arange(n)
    frames = {"P": pd.DataFrame({"k": k, "y": rng.normal(size=n)})}
    for name in CLIENTS:
        frames[name.upper()] = pd.DataFrame({"k": k, name: rng.normal(size=n)})[rng.random(n) < 0.8]
    return frames


def groups_released(policy, departs=False):
    """Fit every formula by site, in two ways; return the groups at each site and the number of refusals.

    A coordinator that deviates assigns the entities to other groups in every fit.
    """
    frames = institutions()
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    released, refused = {name.upper(): [] for name in CLIENTS}, 0
    chosen = [c for size in (4, 3) for c in itertools.combinations(CLIENTS, size)]
    for columns, method in itertools.product(chosen, ("vfem", "impute")):
        if departs:
            partition.division.without.clear()
            partition.division.left_out = np.zeros(0, dtype=np.int64)
        model = fs.VFEMRegression.from_formula(f"y ~ {' + '.join(columns)}", partition)
        with tapped(model) as wire:
            try:
                model.fit(method=method, cov_type="none")
            except PolicyError:
                refused += 1
        blocks = {block.site: block for block in model.design.blocks}
        for site in released:
            staged = wire.handed_to(site, "stage_block", "keep")
            for code in wire.handed_to(site, "sum_products", "code"):
                if not wire.sent_by(site, "sum_products", "sums"):
                    continue
                rows = model.design.entities[blocks[site].rows[staged[-1]]]
                group = np.full(400, -1)
                filled = wire.handed_to(site, "stage_block", "rows")
                group[rows] = code[filled[-1]] if filled else code
                released[site].append(group)
    return released, refused


def entities_told_apart(codes):
    """Entities whose row is a combination of the sums: by linear algebra over cells of all groups."""
    if not codes:
        return 0
    cells, counts = np.unique(np.column_stack(codes), axis=0, return_counts=True)
    here = (cells >= 0).any(axis=1)
    groups = [cells[:, j] == g for j in range(cells.shape[1]) for g in range(cells[:, j].max() + 1)]
    R = np.array(groups, dtype=float)[:, here]
    _, s, Vt = np.linalg.svd(R, full_matrices=False)
    V = Vt[s > 1e-9 * s[0]]
    determined = np.abs((V**2).sum(axis=0) - 1.0) < 1e-7
    return int((determined & (counts[here] < 5)).sum())


def test_many_fits_reveal_no_entity_from_the_others():
    released, refused = groups_released("open")
    assert sum(map(entities_told_apart, released.values())) > 0 and not refused
    released, refused = groups_released("strict")
    assert sum(map(entities_told_apart, released.values())) == 0 and not refused
    released, refused = groups_released(Policy.strict(max_refusals=0), departs=True)
    assert sum(map(entities_told_apart, released.values())) == 0 and refused
    assert all(released.values())


def test_powers_of_few_rows_do_not_leave():
    """Sums of all powers of a column's values have these as their nodes (Newton's identities)."""
    rng = np.random.default_rng(6)
    sites = np.repeat(["S0", "S1", "S2"], 8)
    frame = pd.DataFrame({"site": sites, "x": rng.normal(50, 9, 24), "y": rng.normal(size=24)})
    partition = fs.ClientPartition.from_frame(frame, by="site", policy="open")
    for degree in (3, 10):
        with pytest.raises(PolicyError, match="maximum parameters per row"):
            fs.FederatedGLM.from_formula(f"y ~ poly(x, {degree})", partition, family=sm.families.Gaussian())
    for site in partition.sites.values():
        assert not [entry for entry in site.ledger.entries if entry.array == "sums"]


def test_one_division_serves_all_methods_where_answers_are_remembered():
    """Mean imputation after VFEM: the records that merged patterns set aside stay aside, and it passes."""
    frames = fs.datasets.load_sme()
    fits = {}
    for policy, methods in {"open": ("vfem", "impute"), "strict": ("vfem", "impute", "vfem")}.items():
        partition = fs.ClientPartition.from_frames(frames, on="enterprise_id", policy=policy)
        fits[policy] = [
            fs.VFEMRegression.from_formula("NPGR ~ .", partition).fit(method=method) for method in methods
        ]
    first, imputed, again = fits["strict"]
    # Values are dithered before they are summed, by secrets of the sites.
    apart = ((first.params - fits["open"][0].params) / first.bse).abs().max()
    assert 0.0 < apart < 0.05
    np.testing.assert_allclose(first.bse, fits["open"][0].bse, rtol=5e-3)
    np.testing.assert_allclose(again.params, first.params, rtol=1e-9)
    assert "as in an earlier fit of this partition" in str(imputed.summary(notes="all"))
    assert "as in an earlier fit" not in str(first.summary(notes="all")) + str(
        fits["open"][1].summary(notes="all")
    )
    distance = ((imputed.params - fits["open"][1].params) / imputed.bse).abs().max()
    assert 0.0 < distance < 1.0
