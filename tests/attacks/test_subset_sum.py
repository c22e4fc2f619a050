"""Columns of zeros and ones in small released patterns: the coordinator lists what fits the released sums.

It runs the bank, which holds the response y and a column a. For a pattern it receives sum(b), and from
secure products sum(b y) and sum(b a): all assignments that fit are listed by meeting in the middle.
"""

import numpy as np
import pandas as pd
import pytest
from recovery import relative_error

import fedstat as fs
from fedstat.errors import DescriptionError, EstimationError
from fedstat.federation.disclosure.facts import GroupSums
from fedstat.federation.disclosure.row_checks import check_cardinality
from fedstat.federation.disclosure.site import Site
from fedstat.federation.tables.cardinality import (
    DITHERED,
    EXACT,
    ColumnCardinality,
    DiscreteColumn,
    min_group_size,
)
from fedstat.models.vertical.exchange import standardized_columns
from fedstat.models.vertical.exchange.standardized_columns import WIDTH, dithered
from fedstat.models.vertical.pattern_merging import PatternRule

MOST = 32


def assignments(V, total, sums, tolerance):
    """All b in {0,1}^n with sum(b) = total and V'b near the sums, V (n, 2): at most 20."""
    h = len(V) // 2

    def half(part):
        bits = ((np.arange(2 ** len(part))[:, None] >> np.arange(len(part))) & 1).astype(np.int8)
        return bits, bits.sum(axis=1), bits @ part

    (A, ca, sa), (B, cb, sb) = half(V[:h]), half(V[h:])
    order = np.argsort(sb[:, 0])
    first, found = sb[order, 0], []
    low = np.searchsorted(first, sums[0] - tolerance[0] - sa[:, 0])
    high = np.searchsorted(first, sums[0] + tolerance[0] - sa[:, 0])
    for i in np.flatnonzero(high > low):
        near = order[low[i] : high[i]]
        fits = (ca[i] + cb[near] == total) & (np.abs(sa[i] + sb[near] - sums) < tolerance).all(axis=1)
        found += [np.concatenate([A[i], B[j]]) for j in near[fits]]
        if len(found) > 20:
            break
    return found


def study(seed, n=200, share=0.2):
    rng = np.random.default_rng(seed)
    k = np.arange(n)
    bank = pd.DataFrame({"k": k, "y": rng.normal(size=n), "a": rng.normal(size=n)})
    court = pd.DataFrame({"k": k, "convicted": (rng.random(n) < 0.4).astype(float)})[rng.random(n) < share]
    registry = pd.DataFrame({"k": k, "c": rng.normal(size=n)})[rng.random(n) < 0.8]
    return {"Bank": bank, "Court": court, "Registry": registry}


def attack(frames, policy):
    """Errors of the attack on every pattern that shows the court's column, with how many answers fit."""
    bank, court, registry = frames.values()
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    moments = (
        fs.VFEMRegression.from_formula("y ~ .", partition)
        .fit(cov_type="none", max_moved=1.0)
        .exchange.moments
    )
    at = {c: j for j, c in enumerate(moments.sites)}
    has = np.column_stack([np.isin(bank.k, f.k) for f in (bank, court, registry)])
    names = ["1", *moments.names, "y"]
    b, known = names.index("convicted"), [names.index("y"), names.index("a")]
    slack = 0.0 if policy.rounding == "none" else WIDTH / np.sqrt(12.0)
    found = []
    for g in np.flatnonzero(moments.patterns[:, at["Court"]]):
        members = has[:, 1] & (has[:, 2] | ~moments.patterns[g, at["Registry"]])
        if moments.patterns[:, at["Court"]].sum() > 1:
            members &= has[:, 2] == moments.patterns[g, at["Registry"]]
        G, c, s, m = moments.grams[g], moments.center, moments.scale, moments.n[g]
        assert members.sum() == m
        Z = (bank[["y", "a"]].to_numpy()[members] - c[[i - 1 for i in known]]) / s[[i - 1 for i in known]]
        truth = court.set_index("k").convicted.reindex(bank.k[members]).to_numpy()
        # Releases of the column in its own unit: its total, and products with y and a.
        total = c[b - 1] * m + s[b - 1] * G[0, b]
        sums = c[b - 1] * Z.sum(axis=0) + s[b - 1] * G[known, b]
        noise = slack * s[b - 1] * np.linalg.norm(Z, axis=0)
        fits = []
        if m <= MOST:
            fits = assignments(Z, round(total), sums, 3e-8 * m + 2.0 * noise)
        if fits:
            guess = np.mean(fits, axis=0)
        else:  # the smallest column that fits
            W = np.column_stack([np.ones(len(Z)), Z])
            guess = W @ np.linalg.solve(W.T @ W, np.array([total, *sums]))
        found.append((int(m), len(fits), relative_error(guess[:, None], truth[:, None])))
    return found


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
@pytest.mark.parametrize("seed", range(3))
def test_exact_sums_of_small_groups_give_every_value_and_under_bits_no_such_sums_leave(seed):
    frames = study(seed)
    got = [one for one in attack(frames, fs.Policy.open()) if one[0] <= MOST]
    assert got and all(fits == 1 and error == 0.0 for _, fits, error in got)
    try:
        left = attack(frames, fs.Policy.strict())
    except EstimationError:
        return  # all of the court's entities are in patterns that are not released
    assert all(error > 0.5 for _, _, error in left)


def test_what_is_released_under_strict_determines_nothing():
    frames = study(5, n=400, share=0.3)
    left = attack(frames, fs.Policy.strict())
    assert left and min(m for m, _, _ in left) >= 2 * DITHERED
    assert all(fits != 1 for _, fits, _ in left)
    assert all(error > 0.5 for _, _, error in left)


def test_dither_alone_leaves_several_answers_to_groups_that_exact_sums_determine():
    frames = study(1)
    small = [one for one in attack(frames, fs.Policy.open()) if 24 < one[0] <= MOST]
    moved = [one for one in attack(frames, fs.Policy(rounding="dither")) if 24 < one[0] <= MOST]
    assert small and all(fits == 1 for _, fits, _ in small)
    assert all(fits > 1 for _, fits, _ in moved)


def indicator(columns=1, levels=2, alone=True):
    return DiscreteColumn(levels, columns, alone)


def test_entities_that_a_column_of_few_values_needs():
    # Documentation of the rule: ten entities for each other column if dithered, fifty if exact.
    for carried in (EXACT, DITHERED):
        for p in (1, 5, 20):
            least = min_group_size((ColumnCardinality(p, (indicator(),), carried),))
            assert p * carried < least <= p * carried + 12
    # Counts of two columns of few values are less than a double holds.
    assert min_group_size((ColumnCardinality(0, (indicator(), indicator()), EXACT),)) < 12
    assert min_group_size((ColumnCardinality(0, (indicator(), indicator(alone=False)), EXACT),)) > EXACT
    # More levels have more bits, and so have their sums.
    assert min_group_size((ColumnCardinality(5, (indicator(1, 16),), DITHERED),)) < 5 * DITHERED
    assert min_group_size((ColumnCardinality(5, (indicator(15, 16),), DITHERED),)) > 15 * 5 * DITHERED / 4
    assert min_group_size((ColumnCardinality(30),)) == 0
    twice = min_group_size((ColumnCardinality(5, (indicator(),), DITHERED),), 2)
    assert twice > 100


def test_the_plan_knows_the_columns_of_all_that_a_pattern_shows():
    judged = ColumnCardinality(2, (indicator(),), DITHERED)
    rule = PatternRule(5, (3, 4), (judged, None), None)
    assert rule.least((True, False)) == min_group_size((judged, ColumnCardinality(1)))
    assert rule.least((True, True)) == min_group_size((judged, ColumnCardinality(5)))
    assert rule.least((False, True)) == PatternRule(5, (3, 4)).least((False, True)) == 10


def test_a_site_refuses_from_published_levels_and_sizes_of_groups():
    policy = fs.Policy(discrete="bits", rounding="dither")
    site = Site("Court", pd.DataFrame({"b": [0.0, 1.0] * 20}), policy)
    detail = ColumnCardinality(0, (indicator(),), DITHERED)
    code = np.repeat([0, 1], [25, 15])
    check_cardinality(site._data, GroupSums(code, 1, detail=detail, other_columns={0: 1, 1: 0}))
    with pytest.raises(DescriptionError, match=r'a requested group has 15.*discrete = "any"'):
        check_cardinality(site._data, GroupSums(code, 2, detail=detail, other_columns={0: 1, 1: 2}))
    check_cardinality(site._data, GroupSums(code, 2, other_columns={0: 9, 1: 9}))


def test_values_move_alike_in_every_guise_and_at_every_asking():
    rng = np.random.default_rng(0)
    x = rng.normal(size=50)
    frame = pd.DataFrame({"x": x})
    site, other = (Site("A", frame, fs.Policy(rounding="dither")) for _ in range(2))
    X = np.column_stack([x, 3.0 - 2.0 * x, x**2])
    first = dithered(site._data, X)
    moves = (first - X) / X.std(axis=0)
    assert np.abs(moves).max() <= WIDTH / 2.0
    np.testing.assert_allclose(moves[:, 1], -moves[:, 0], atol=1e-12)
    assert abs(np.corrcoef(moves[:, 0], moves[:, 2])[0, 1]) < 0.5
    np.testing.assert_array_equal(dithered(site._data, X), first)
    assert not np.allclose(dithered(other._data, X), first, atol=1e-4)
    np.testing.assert_array_equal(dithered(Site("A", frame)._data, X), X)


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_a_summary_says_what_merging_cost_and_what_gives_it_back():
    frames = fs.datasets.load_sme()
    agency = frames["Credit Agency"]
    frames = frames | {"Credit Agency": agency.assign(EMP=(agency.EMP > 0.5).astype(float))}
    fits = {}
    for name, policy in {"open": "open", "strict": "strict"}.items():
        partition = fs.ClientPartition.from_frames(frames, on="enterprise_id", policy=policy)
        fits[name] = fs.VFEMRegression.from_formula("NPGR ~ .", partition, between="independent").fit()
    strict, cost = fits["strict"], fits["strict"].exchange.by_bits
    assert fits["open"].exchange.by_bits is None and "discrete" not in str(fits["open"].summary(notes="all"))
    assert set(cost.sites) == {"Credit Agency"} and cost.lost["Credit Agency"] > 0 < cost.short
    text = " ".join(str(strict.summary(notes="all")).split())
    assert f"{cost.lost['Credit Agency']:,} at Credit Agency" in text
    assert 'discrete = "any" in policy.toml of Credit Agency' in text
    assert "every value was moved by up to .005 standard deviations" in text
    assert 1.0 < (strict.bse / fits["open"].bse).max() < 1.2


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_a_coordinator_that_plans_by_equations_alone_is_refused(monkeypatch):
    monkeypatch.setattr(PatternRule, "in_bits", False)
    # The rule on products would refuse the few rows of a level in these patterns before.
    uncounted = fs.Policy.strict(products="any")
    partition = fs.ClientPartition.from_frames(study(0), on="k", policy=uncounted)
    with pytest.raises(DescriptionError, match=r"Court: its policy .bits of columns of few values"):
        fs.VFEMRegression.from_formula("y ~ .", partition).fit(max_moved=1.0)
    # Where the owner allows it, exact sums give every value again.
    allowed = fs.Policy.strict(discrete="any", rounding="none", products="any")
    found = attack(study(0), allowed)
    small = [one for one in found if one[0] <= MOST]
    assert small and all(fits == 1 and error == 0.0 for _, fits, error in small)


# ---- over several fits -----------------------------------------------------------------------------

ALLIES = 6


def study_with_an_ally(seed, m=30, n=300):
    """The court has m entities; the bank, at which the coordinator sits, has columns one of which it adds."""
    rng = np.random.default_rng(seed)
    k = np.arange(n)
    bank = pd.DataFrame(rng.normal(size=(n, ALLIES + 1)), columns=["y", *(f"a{j}" for j in range(ALLIES))])
    court = pd.DataFrame({"k": k[:m], "convicted": np.repeat([0.0, 1.0], m // 2)[rng.permutation(m)]})
    return {
        "Bank": bank.assign(k=k),
        "Court": court,
        "Registry": pd.DataFrame({"k": k, "c": rng.normal(size=n)}),
    }


def equations(partition, frames, ally):
    """Information from a fit on the bank's columns about the court's: columns Z (m, 2), their sums, total."""
    model = fs.VFEMRegression.from_formula(f"y ~ convicted + {ally}", partition, coordinator="Bank")
    moments = model.fit(cov_type="none", max_moved=1.0).exchange.moments
    names = ["1", *moments.names, "y"]
    b, known = names.index("convicted"), [names.index("y"), names.index(ally)]
    g = np.flatnonzero(moments.patterns[:, list(moments.sites).index("Court")])[0]
    G, c, s, m = moments.grams[g], moments.center, moments.scale, int(moments.n[g])
    columns = frames["Bank"][["y", ally]].to_numpy()[:m]
    Z = (columns - c[[i - 1 for i in known]]) / s[[i - 1 for i in known]]
    total = c[b - 1] * m + s[b - 1] * G[0, b]
    return Z, c[b - 1] * Z.sum(axis=0) + s[b - 1] * G[known, b], total, s[b - 1] * np.linalg.norm(Z, axis=0)


def over_several_fits(policy, seed):
    """Answers that fit all equations, whether the last one is the truth, and the words of the policy."""
    frames = study_with_an_ally(seed)
    partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
    reported, refused = [], ""
    for j in range(ALLIES):
        try:
            reported.append(equations(partition, frames, f"a{j}"))
        except DescriptionError as error:
            refused = str(error)
    # y is in all fits and is dithered alike; so are the columns of the bank, which knows them exactly.
    Z = np.column_stack([reported[0][0], *(one[0][:, 1] for one in reported[1:])])
    sums = np.concatenate([reported[0][1], *(one[1][1:] for one in reported[1:])])
    noise = np.concatenate([reported[0][3], *(one[3][1:] for one in reported[1:])]) * WIDTH / np.sqrt(12.0)
    fits = assignments(Z, round(reported[0][2]), sums, 1e-6 + 6.0 * noise)
    truth = frames["Court"].convicted.to_numpy()
    return [int(np.abs(one - truth).sum()) for one in fits], refused, (partition, frames)


@pytest.mark.filterwarnings("ignore::fedstat.errors.DataWarning")
def test_fits_with_ever_other_columns_of_an_ally_do_not_add_up(monkeypatch):
    wrong, refused, (partition, frames) = over_several_fits("strict", 1)
    assert len(wrong) > 1 and "Court: its policy (bits of columns of few values)" in refused
    assert "including earlier fits with other columns" in refused
    # The same fit gives nothing new, and passes.
    equations(partition, frames, "a0")
    # Without the memory of products all sums leave, and there is one answer.
    monkeypatch.setattr(standardized_columns, "marks_by_group", lambda site_ledger: {})
    wrong, refused, _ = over_several_fits("strict", 1)
    assert wrong == [0] and not refused
