"""What sites release of any family, computed again without each row, singles out no rows."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from attacker.attack import run_campaign
from attacker.calls import KINDS, Call, draw_call, model
from attacker.grammar import design_of, products
from attacker.influence import (
    ALLOW,
    REFUSING,
    Answering,
    Correction,
    Examined,
    Held,
    counted,
    examine,
    examine_all,
    judge,
    judge_totals,
    partition_of,
    rows_used,
    run,
)
from attacker.tables import Structure

import fedstat as fs
from fedstat.federation.disclosure import weighted_sums

AN_HOUR = 3600.0
OWN_NOT = {"local": False}


def table_of(column, by):
    return Call(f"table_one {column} by {by}", lambda partition: fs.table_one(partition, column, by=by))


def drawn(seed=3, n=50):
    rng = np.random.default_rng(seed)
    structure = Structure.draw(rng, n)
    return structure, structure.fill(rng)


def test_terms_of_least_squares_are_products_of_columns():
    _, table = drawn()
    asked = run(model("FederatedOLS", "y ~ z + s + m"), partition_of({"A": table}, "open"))["A"]
    _, terms, sums = Answering("A").terms(table, [request for request, _ in asked])
    found = np.hstack([value[:, sums[name]] for name, value in terms.items()])
    wanted = products(design_of(["z", "s", "m"], "y", table))
    left = wanted - found @ np.linalg.lstsq(found, wanted, rcond=1e-10)[0]
    assert np.abs(left).max() < 1e-7 * np.abs(wanted).max()


def test_rows_that_hold_nothing_have_no_terms():
    structure, table = drawn()
    asked = run(model("FederatedOLS", "y ~ m"), partition_of({"A": table}, "open"))["A"]
    _, terms, _ = Answering("A").terms(table, [request for request, _ in asked])
    sums = np.hstack([value for name, value in terms.items() if name[1] != "survey_rows"])
    assert structure.lacking.any() and not sums[structure.lacking].any()
    assert sums[~structure.lacking].any(axis=1).all()


def planted(n=45):
    """Structure in which row 3 of a has another x, its row 5 another b, and a level of g has one row more."""
    rng = np.random.default_rng(2)
    few = Structure.draw(rng, n).few
    a = (np.arange(n) % 3 == 0) * 1.0
    inside, outside = np.flatnonzero(a), np.flatnonzero(a == 0.0)
    x, b = rng.integers(0, 3, n) * 1.0, a.copy()
    x[inside], x[inside[3]], b[inside[5]] = 1.0, 2.0, 0.0
    g = np.where((a > 0.0) | (np.arange(n) == outside[7]), "u", "v")
    none = np.zeros(n, dtype=bool)
    structure = Structure(few.assign(a=a, b=b, x=x, g=g), none, none, ~none)
    return structure, {"x": int(inside[3]), "b": int(inside[5]), "g": int(outside[7])}


HOLES = {
    "a product and three values": ("x", [model("FederatedOLS", "y ~ a:z + x", OWN_NOT)]),
    "weights": ("x", [model("FederatedOLS", "y ~ a:z + x", OWN_NOT, var_weights="w")]),
    "a logistic model": ("x", [model("GLORE", "e ~ a:w + x", OWN_NOT)]),
    "a table and a fit": ("g", [table_of("z", "g"), model("FederatedOLS", "z ~ a", OWN_NOT)]),
    "a table and a product": ("b", [table_of("z", "a"), model("FederatedOLS", "z ~ a:b", OWN_NOT)]),
}


ONE_SITE = replace(REFUSING, masked_only=False, min_own_rows=0)
"""What a single small site is asked under, so that the rules on sums refuse, and not the number of rows."""


@pytest.mark.parametrize("hole", HOLES)
def test_what_rules_refuse_is_found_where_they_are_off(hole):
    row, calls = HOLES[hole]
    structure, rows = planted()
    rng = np.random.default_rng(1)
    table = structure.fill(rng)
    found = []
    for policy in (ALLOW, ONE_SITE):
        partition = partition_of({"A": table}, policy)
        released = [run(call, partition)["A"] for call in calls]
        found.append(judge("A", table, structure, released, rng, Examined(), 2))
    assert (rows[row],) in found[0] and not found[1], (found, rows)


@pytest.mark.parametrize("with_key", [True, False])
def test_a_corrected_record_is_found_where_rules_are_off(with_key):
    """The sums before and after differ by what one record held and holds."""
    structure, table = drawn(1, 60)
    correction, rng = Correction(1, np.array([4]), ("z",), with_key), np.random.default_rng(3)
    later, call, found = correction.corrected(rng, table), model("FederatedOLS", "y ~ z", OWN_NOT), []
    for policy in (ALLOW, ONE_SITE):
        partition = partition_of({"A": table}, policy)
        released = []
        for version in (table, later):
            correction.read(partition.sites["A"], version)
            released.append(run(call, partition)["A"])
        of_both = {"correction": correction, "later": later}
        found.append(judge("A", table, structure, released, rng, Examined(), 3, **of_both))
    assert found == [[(4,)], []]


def with_apart(seed, apart, n=48):
    """Structure in which `apart` rows have a and not b, and the first of these rows."""
    few, k = Structure.draw(np.random.default_rng(seed), n).few, np.arange(n)
    a = (k % 2) * 1.0
    b = np.where(a == 1.0, 1.0, (k % 4 == 0) * 1.0)
    b[np.flatnonzero(a)[:apart]] = 0.0
    none = np.zeros(n, dtype=bool)
    return Structure(few.assign(a=a, b=b, e=(k % 3 == 0) * 1.0), none, none, ~none), int(np.flatnonzero(a)[0])


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_masked_part_of_one_row_counts_if_the_others_have_fewer_than_two(monkeypatch, others, compares):
    """In a logistic model, the weights of the rows with a and not b are a sum of their own.

    It is released where sites do not compare their rows.
    """
    if not compares:
        monkeypatch.setattr(weighted_sums, "_is_hidden", lambda *args: True)
    rng = np.random.default_rng(1)
    structures = {
        site: with_apart(seed, k)[0] for seed, (site, k) in enumerate(zip("ABC", (1, others, 0), strict=True))
    }
    row, tables = with_apart(0, 1)[1], {site: one.fill(rng) for site, one in structures.items()}
    passed = run(model("GLORE", "e ~ a + b + z", OWN_NOT), partition_of(tables, REFUSING))
    held = [Held(site, table, structures[site], [passed[site]], [{}]) for site, table in tables.items()]
    found = judge_totals(held, rng)
    assert any(row in S for S in found) == (others < 2 and not compares), found


def test_small_counts_are_tolerated_and_sums_are_not():
    counts = np.ones((50, 1)) * [1.0, 1.0]
    counts[7, 1] = 0.0
    assert counted(counts, (7,)) and not counted(counts, (8,)) and not counted(counts[:, :1], (7,))


def test_all_families_of_rows_are_attacked(monkeypatch):
    """The registry of all public families names those whose sites hold rows."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "contracts")
    from families import FITS

    asks_no_site = {"pool", "combine", "meta", "compare"}
    wanted = {fit.family for fit in FITS.values() if fit.data == "rows"} - asks_no_site
    assert wanted - {name for _, names in KINDS.values() for name in names} == set()


def test_calls_of_all_kinds_run_on_an_open_site():
    rng = np.random.default_rng(0)
    table = replace(drawn(5, 90)[0], incomplete=True).fill(rng)
    answered = defaultdict(int)
    for kind in KINDS:
        for _ in range(3):
            passed = run(draw_call(rng, (kind,)), partition_of({"A": table}, fs.Policy.open()))
            answered[kind] += len(passed["A"]) > 1
    assert set(answered) == set(KINDS) and all(answered.values()), dict(answered)


# A level differs by two rows from that of another column, which a curve had counted.
# The others have sums over groups that three sites mask, and a column that is zero but in three rows.
@pytest.mark.parametrize("seed", [700_003, 700_054, pytest.param(700_122, marks=pytest.mark.attack)])
def test_sequences_that_singled_out_rows_do_so_no_more(seed):
    assert not examine(seed, Examined(), kinds=tuple(KINDS)[: [*KINDS].index("aft")])


@pytest.mark.attack
def test_masked_parts_of_a_propensity_model_of_five_arms_are_no_finding():
    """Weights of arms that nearly exclude each other approach indicators of few rows, at one site alone."""
    examined = Examined()
    assert not examine(991_033, examined, kinds=("ols", "weighted"), site="A")
    assert examined.of_parts == 1


@pytest.mark.attack
def test_an_iterated_fit_of_one_unmasked_site_nearly_singles_out_two_rows():
    """What the threat statements say of a site if all others collude: nine digits cancel, five are left."""
    (found,) = examine(410_027, Examined())
    assert found.rows == [(6, 16)] and "FederatedAFT" in found.texts[-1]


def test_a_site_that_leaves_out_rows_is_examined_over_the_rows_that_it_used():
    """Few rows lack m: after an analysis of m, others use fewer rows, and their sums are computed again."""
    structure, table = drawn(5, 65)
    at = partition_of({"A": table}, replace(fs.Policy.strict(), masked_only=False, min_own_rows=0))
    passed = [run(model("FederatedOLS", f"y ~ {name}", OWN_NOT), at)["A"] for name in ("z", "m", "z")]
    used = [rows_used(at.sites["A"])] * len(passed)
    assert used[0] and not all(rows.all() for rows in used[0].values())
    for rows, is_read in ((used, True), (None, False)):
        examined = Examined()
        assert not judge("A", table, structure, passed, np.random.default_rng(2), examined, 3, rows)
        assert any("sum" in step for step in examined.unread) != is_read


def test_no_family_singles_out_rows_under_the_strict_policy():
    examined = examine_all(range(4), seconds=15.0)
    print(examined)
    assert not examined.findings, "\n".join(map(str, examined.findings))
    assert not any("sum" in step for step in examined.unread), str(examined)


@pytest.mark.attack
@pytest.mark.parametrize("campaign", [run_campaign, examine_all])
def test_an_hour_of_sequences(campaign):
    """Set FEDSTAT_ATTACK_SEED to draw others."""
    first = int(os.environ.get("FEDSTAT_ATTACK_SEED", "1000"))
    done = campaign(range(first, first + 10**9), seconds=AN_HOUR / 2)
    print(done)
    assert not done.findings, "\n".join(str(finding) for finding in done.findings)


@pytest.mark.parametrize("compares", [True, False])
def test_wards_of_one_site_are_found_where_sites_do_not_compare_their_rows(monkeypatch, compares):
    """Seed 38: of the rows of a ward that one site has, one has k, in a logistic model with a number."""
    if not compares:
        monkeypatch.setattr(weighted_sums, "_is_hidden", lambda *args: True)
    assert bool(examine(38, Examined(), site="A")) != compares
