"""Families as data: what is sent, what is refused, what is restored."""

import json
import warnings

import numpy as np
import pytest
import scipy.stats
from statsmodels.genmod import families
from statsmodels.genmod.families import links

from fedstat.errors import MessageError, ModelError
from fedstat.kernels.glm.distributions import DistributionSpec

FAMILIES = [
    families.Binomial(),
    families.Binomial(links.Probit()),
    families.Binomial(links.Cauchy()),
    families.Binomial(links.CLogLog()),
    families.Binomial(links.LogLog()),
    families.Binomial(links.Log()),
    families.Binomial(links.LogC()),
    families.Binomial(links.Identity()),
    families.Poisson(),
    families.Poisson(links.Sqrt()),
    families.NegativeBinomial(alpha=0.5),
    families.NegativeBinomial(links.NegativeBinomial(alpha=0.5), alpha=0.5),
    families.NegativeBinomial(links.Power(power=0.3), alpha=2),
    families.Gamma(),
    families.InverseGaussian(),
    families.Gaussian(),
    families.Gaussian(links.Logit(), check_link=False),
    families.Tweedie(var_power=1.5, eql=True),
    families.Tweedie(links.Power(power=-0.5), var_power=1.5),
]


def wire(**changes):
    numbers = {"power": None, "alpha": None, "var_power": None, "eql": False}
    return json.dumps({"name": "Binomial", "link": "Logit"} | numbers | changes)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(DistributionSpec.of(family)))
def test_a_family_survives_the_wire(family):
    mu = np.array([0.2, 0.5, 0.9])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = DistributionSpec.from_json(DistributionSpec.of(family).to_json())
        made = spec.make()
    assert type(made) is type(family)
    np.testing.assert_array_equal(made.link.deriv(mu), family.link.deriv(mu))
    np.testing.assert_array_equal(made.link.inverse(mu), family.link.inverse(mu))
    np.testing.assert_array_equal(made.variance(mu), family.variance(mu))
    assert getattr(made, "eql", None) == getattr(family, "eql", None)
    assert DistributionSpec.of(made) == spec


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(DistributionSpec.of(family)))
def test_canonical_is_where_the_weight_is_one_over_the_variance(family):
    """With the canonical link, g' V is constant, so that the observed information has no data in it."""
    mu = np.linspace(0.1, 0.9, 7)
    product = family.link.deriv(mu) * family.variance(mu)
    assert DistributionSpec.of(family).canonical == bool(np.ptp(product) < 1e-12)


def test_a_class_means_its_default_link():
    assert DistributionSpec.of(families.Gamma) == DistributionSpec("Gamma", "InversePower")


def test_the_same_link_has_one_name():
    assert DistributionSpec.of(families.Tweedie(links.Power(power=-1), 2)) == DistributionSpec(
        "Tweedie", "InversePower", var_power=2.0
    )


def test_a_deprecated_alias_is_its_link():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alias = links.cloglog()
    assert DistributionSpec.of(families.Binomial(alias)).link == "CLogLog"


class OwnFamily(families.Poisson):
    """Looks like a known one."""


class OwnLink(links.Log):
    """Looks like a known one."""


@pytest.mark.parametrize(
    "family, phrase",
    [
        ("binomal", "expected one of gaussian, binomial"),
        (OwnFamily(), "OwnFamily"),
        (families.Poisson(OwnLink()), "OwnLink"),
        (families.Binomial(links.CDFLink(scipy.stats.logistic)), "CDFLink"),
        (families.Binomial(links.Probit(scipy.stats.logistic)), "its own distribution"),
        (families.NegativeBinomial(links.NegativeBinomial(alpha=1.0), alpha=2.0), "differ in alpha"),
        (families.NegativeBinomial(alpha=0.0), "positive"),
        (families.Tweedie(var_power=0.5), "at least 1"),
        (families.Poisson(links.Power(power=0.0), check_link=False), "constant"),
    ],
)
def test_what_cannot_be_reported_by_name_is_refused(family, phrase):
    with pytest.raises(ModelError, match=phrase):
        DistributionSpec.of(family)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1, 2]",
        "[" * 100_000,
        None,
        wire(name="os.system"),
        wire(name=["Binomial"]),
        wire(link="CDFLink"),
        wire(link={"Logit": 1}),
        wire(power=2.0),
        wire(link="Power"),
        wire(link="Power", power="2"),
        wire(link="Power", power=True),
        wire(link="Power", power=float("nan")),
        wire(link="Power", power=10**400),
        wire(name="NegativeBinomial", link="Log", alpha=-1),
        wire(name="NegativeBinomial", link="Log", alpha=float("inf")),
        wire(name="Tweedie", link="Log", var_power=3, eql=True),
        wire(eql=1),
        wire(eql=True),
        wire(more=1),
        json.dumps({"name": "Binomial", "link": "Logit"}),
    ],
    ids=lambda text: str(text)[:70],
)
def test_a_stranger_s_family_is_refused(text):
    with pytest.raises(MessageError):
        DistributionSpec.from_json(text)


def test_only_families_of_fixed_dispersion_do_not_estimate_it():
    fixed = {str(DistributionSpec.of(f).name) for f in FAMILIES if not DistributionSpec.of(f).estimates_scale}
    assert fixed == {"Binomial", "Poisson", "NegativeBinomial"}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("binomial", families.Binomial()),
        ("Poisson", families.Poisson()),
        ("normal", families.Gaussian()),
        ("negative binomial", families.NegativeBinomial()),
        ("inverse_gaussian", families.InverseGaussian()),
        ("gamma", families.Gamma()),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_family_has_a_name(name, family):
    assert DistributionSpec.of(name) == DistributionSpec.of(family)
