"""Random sequences of analyses on tables with planted cells, judged by an oracle without declarations."""

from __future__ import annotations

import numpy as np
import pytest
from attacker.attack import Campaign, attack, run_campaign
from attacker.grammar import products
from attacker.oracle import TooFewDrawsError, singled_out
from attacker.tables import Structure

N = 40


def planted(seed):
    """Indicators a and b that differ in a row, x that is 1 in the rows of a but for one, and these rows."""
    rng = np.random.default_rng(seed)
    a = (rng.random(N) < 0.4) * 1.0
    inside = np.flatnonzero(a)
    x = rng.integers(0, 3, N) * 1.0
    x[inside], x[inside[3]] = 1.0, 2.0
    b = a.copy()
    b[inside[5]] = 0.0
    return rng, a, b, x, int(inside[3]), int(inside[5])


def design(*columns):
    return np.column_stack([np.ones(N), *columns])


CASES = {
    "OLS y ~ z": (lambda z, y, a, b, x: products(design(z, y)), None),
    "OLS z ~ a": (lambda z, y, a, b, x: products(design(z, a)), None),
    "OLS y ~ a:z + x": (lambda z, y, a, b, x: products(design(a * z, x, y)), "top"),
    "OLS z ~ a, then z ~ a:b": (
        lambda z, y, a, b, x: np.hstack([products(design(a, z)), products(design(a * b, z))]),
        "other",
    ),
    "table of z by a, then OLS z ~ a:b": (
        lambda z, y, a, b, x: np.hstack([design(a, a * z, a * z**2), products(design(a * b, z))]),
        "other",
    ),
    "weights z": (lambda z, y, a, b, x: products(design(b, y)) * np.abs(z)[:, None], None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_finds_the_planted_rows_and_no_others(case):
    terms, row = CASES[case]
    for seed in range(3):
        rng, a, b, x, top, other = planted(seed)
        draws = [terms(*rng.normal(size=(2, N)), a, b, x) for _ in range(6)]
        expected = {None: [], "top": [(top,)], "other": [(other,)]}[row]
        assert singled_out(draws, 3) == expected


def test_two_rows_are_found_together_and_three_are_enough():
    rng, a, *_ = planted(1)
    for few, expected in ((2, 1), (3, 0)):
        b = a.copy()
        rows = tuple(np.flatnonzero(a)[:few].tolist())
        b[list(rows)] = 0.0
        draws = [np.hstack([products(design(k, z)) for k in (a, b)]) for z in rng.normal(size=(6, N))]
        assert singled_out(draws, 3) == [rows] * expected


def test_a_judgement_needs_more_draws_than_sums():
    with pytest.raises(TooFewDrawsError):
        singled_out([np.eye(5), np.eye(5)], 3)


def test_a_table_has_its_structure_in_each_draw():
    rng = np.random.default_rng(5)
    structure = Structure.draw(rng, 90)
    one, two = structure.fill(rng), structure.fill(rng)
    assert one[structure.few.columns].equals(two[structure.few.columns]) and not one["z"].equals(two["z"])
    for table in (one, two):
        assert (table["m"].isna() == structure.lacking).all() and 1 <= structure.lacking.sum() <= 4
        assert ((table["c"] != table["z"]) == structure.apart).all()
        assert ((table["amount"] > 0.0) == structure.positive).all()


def test_an_open_site_answers_what_singles_out_rows():
    campaign = run_campaign(range(5), "open")
    assert campaign.answered > campaign.refused and len(campaign.findings) >= 2, str(campaign)


def test_no_sequence_singles_out_rows_under_the_strict_policy():
    """The same sequences on every computer; ``pytest -m attack`` runs others for an hour."""
    campaign = run_campaign(range(60), "strict")
    print(campaign)
    assert not campaign.findings, "\n".join(str(finding) for finding in campaign.findings)
    assert campaign.answered > 0.15 * (campaign.answered + campaign.refused), str(campaign)


def test_a_level_of_a_response_and_one_of_a_column_are_two_levels():
    """A count of one row follows by subtraction, which the policy tolerates, as for two columns."""
    assert not attack(930_288, Campaign())


def test_a_sequence_is_drawn_again_from_its_seed():
    first, second = Campaign(), Campaign()
    attack(8, first)
    attack(8, second)
    assert (first.answered, first.refused, first.sums) == (second.answered, second.refused, second.sums)
