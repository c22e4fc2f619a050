"""Every link and distribution of the registries: formulas, derivatives, domains, and the way of a new one."""

import numpy as np
import pytest
from scipy.stats import gumbel_r
from statsmodels.genmod.families import links

import fedstat as fs
from fedstat.errors import ModelError
from fedstat.kernels.glm.distributions import DISTRIBUTIONS, LINKS, DistributionSpec, Link, describe_link
from fedstat.kernels.glm.sums import in_domain

MU = np.linspace(0.15, 0.85, 8)
NUMBERS = {"power": -0.7, "alpha": 0.6, "var_power": 1.4}


def make_link(name):
    return LINKS[name].kind(**{number: NUMBERS[number] for number in LINKS[name].numbers})


def spec_of(distribution, link="Identity"):
    wanted = {*DISTRIBUTIONS[distribution].numbers, *LINKS[link].numbers} - {"eql"}
    return DistributionSpec(distribution, link, **{number: NUMBERS[number] for number in wanted})


def slope_of(function, at, h=1e-6):
    return (function(at + h) - function(at - h)) / (2 * h)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_one_function_with_its_inverse_and_derivatives(name):
    link = make_link(name)
    eta = link(MU)
    np.testing.assert_allclose(link.inverse(eta), MU, rtol=1e-12)
    np.testing.assert_allclose(link.deriv(MU), slope_of(link, MU), rtol=1e-7)
    np.testing.assert_allclose(link.deriv2(MU), slope_of(link.deriv, MU), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(link.inverse_deriv(eta), 1 / link.deriv(MU), rtol=1e-9)


@pytest.mark.parametrize("name", LINKS)
def test_a_closed_link_is_one_whose_means_are_probabilities(name):
    with np.errstate(all="ignore"):
        mu = make_link(name).inverse(np.linspace(-30.0, 30.0, 61))
    assert LINKS[name].closed == bool(np.all((mu >= 0.0) & (mu <= 1.0)))


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_means_inside_are_in_the_domain_of_every_pair(name, distribution):
    family = spec_of(distribution, name)
    assert in_domain(make_link(name)(MU), MU, family).all()
    assert not in_domain(make_link(name)(MU), np.full(8, np.nan), family).any()
    assert family == DistributionSpec.of(family.make()) == DistributionSpec.from_json(family.to_json())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_keeps_to_its_entry(name):
    family, entry = spec_of(name), DISTRIBUTIONS[name]
    if family.variance_power is not None:
        np.testing.assert_allclose(family.make().variance(MU), MU**family.variance_power)
    assert family.support.holds(MU).all()
    assert not family.support.holds(np.array([np.nan, np.inf])).any()
    if entry.single is not None:
        assert entry.single.holds(np.array([0.0, 1.0])).all()
        assert not entry.single.holds(np.array([0.5, np.nan])).any()


class Rosin(links.CDFLink):
    """A link that is not there: of the Gumbel distribution."""

    def __init__(self):
        super().__init__(gumbel_r)


def test_a_new_link_is_one_entry(monkeypatch):
    """Its model is fitted and printed; of 1 - y and -eta it is the complementary log-log link."""
    monkeypatch.setitem(LINKS, "Rosin", Link(Rosin, closed=True, effect="Gumbel quantile of {}"))
    table = fs.datasets.make_hospitals().assign(event=lambda t: t["num"] > 0)
    partition = fs.ClientPartition.from_frame(table.assign(none=~table["event"]), by="hospital")
    binomial = DISTRIBUTIONS["Binomial"].kind
    new = fs.FederatedGLM.from_formula("event ~ age", partition, family=binomial(Rosin())).fit()
    known = fs.FederatedGLM.from_formula("none ~ age", partition, family=binomial(links.CLogLog())).fit()
    np.testing.assert_allclose(new.params, -known.params, rtol=1e-6)
    np.testing.assert_allclose(new.llf, known.llf, rtol=1e-9)
    assert "Rosin" in str(new.summary())


def test_a_link_whose_key_is_not_its_class_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(LINKS, "gumbel", Link(Rosin, closed=True))
    with pytest.raises(
        ModelError, match=r"link Rosin is entered into LINKS as 'gumbel'.*change the key to 'Rosin'"
    ):
        describe_link(Rosin())
    monkeypatch.delitem(LINKS, "gumbel")
    with pytest.raises(ModelError, match="link Rosin has no known name"):
        describe_link(Rosin())
