"""Two sites of a partition of more: a site that has no part in the model deals for them."""

from __future__ import annotations

import numpy as np
import pytest

import fedstat as fs
from fedstat.errors import DescriptionError, ModelError
from fedstat.federation.disclosure.policy import Policy

FRAMES = fs.datasets.load_sme()
MODELS = {"VFEM": (fs.VFEMRegression, {}), "VerticalGLM": (fs.VerticalGLM, {"missing": "em"})}
NAMES = list(fs.ClientPartition.from_frames(FRAMES, on="enterprise_id").sites)
PAIR = ("Platform", "Credit Agency")
THIRD = next(name for name in NAMES if name not in PAIR)

pytestmark = pytest.mark.filterwarnings("ignore::fedstat.errors.FedstatWarning")


def fit(kind, policy, names=NAMES, **options):
    model, more = MODELS[kind]
    partition = fs.ClientPartition.from_frames(
        {name: FRAMES[name] for name in names}, on="enterprise_id", policy=policy
    )
    return partition, model.from_formula("NPGR ~ EMP + ASC", partition, **more, **options).fit()


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_site_that_has_no_part_deals_where_owners_want_a_third(kind):
    partition, found = fit(kind, "strict")
    _, loose = fit(kind, "open")
    error = loose.bse.fillna(1.0)
    assert (abs(found.params - loose.params) < 0.05 * error).all()
    np.testing.assert_allclose(found.bse, loose.bse, rtol=0.01)
    assert f"{THIRD} has no part in this model, and deals" in str(found.summary(notes="all"))
    assert "has no part" not in str(loose.summary(notes="all"))
    reported = found.ledger.releases().query("sender == @THIRD")
    assert set(reported["kind"]) == {"sealed", "control"} and set(reported["step"]) >= {"deal_product"}
    own = [entry.array for entry in partition.sites[THIRD].ledger.entries]
    assert "for_a" in own and not {"sums", "grams", "share"} & set(own)
    if kind != "VFEM":
        return
    # The same one whenever it is asked: the order is that of the partition.
    again = fit(kind, "strict", [*PAIR, *reversed([n for n in NAMES if n not in PAIR])])[1]
    assert f"{next(n for n in reversed(NAMES) if n not in PAIR)} has no part" in str(
        again.summary(notes="all")
    )


def test_it_is_rehearsed():
    partition = fs.ClientPartition.from_frames(FRAMES, on="enterprise_id", policy="strict")
    explanation = fs.VFEMRegression.from_formula("NPGR ~ EMP + ASC", partition).explain()
    assert explanation.passes
    assert "deal_product" in set(explanation.tidy().query("sender == @THIRD")["step"])


def test_a_coordinator_at_one_of_two_needs_no_third_of_the_two():
    _, found = fit("VFEM", "open", coordinator="Platform")
    assert set(found.dealers["dealer"]) == {THIRD}
    with pytest.raises(ModelError, match="no third site"):
        fit("VFEM", "open", PAIR, coordinator="Platform")


def test_two_sites_alone_are_refused_with_the_line():
    with pytest.raises(DescriptionError, match='dealer = "any"'):
        fit("VFEM", Policy.strict(two_sites="warn"), PAIR)
    fit("VFEM", Policy.strict(dealer="any"), PAIR)
