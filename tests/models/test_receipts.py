"""Every family's results have a receipt that verifies, from the fit and from a file."""

import warnings

import numpy as np
import pandas as pd
import pytest

import fedstat as fs
from fedstat.errors import DisclosureWarning, NotAvailableError
from fedstat.federation.audit.release_counts import VERDICT_SOLVABLE


def rows(n=300):
    generator = np.random.default_rng(4)
    table = pd.DataFrame({"x": generator.normal(size=n), "z": generator.normal(size=n)})
    table["y"] = (table["x"] + generator.logistic(size=n) > 0).astype(float)
    return table.assign(site=np.repeat(["A", "B", "C"], n // 3))


@pytest.fixture(scope="module")
def horizontal():
    return fs.ClientPartition.from_frame(rows(), by="site")


@pytest.fixture(scope="module")
def vertical():
    return fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")


def quietly(fit, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(**options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (fs.GLORE, {}),
        (fs.GLORE, {"masked": False, "cov_type": "HC0"}),
        (fs.FederatedGLM, {}),
        (fs.FedAvg, {"rounds": 3}),
        (fs.FedAvgM, {"rounds": 3}),
        (fs.QFedAvg, {"rounds": 3}),
        (fs.FedProx, {"rounds": 3}),
    ],
)
def test_horizontal_families(horizontal, family, options):
    result = quietly(family.from_formula("y ~ x + z", horizontal).fit, **options)
    report = fs.verify_receipt(result.receipt(), horizontal.fingerprints)
    assert report.sites == ("A", "B", "C")


@pytest.mark.parametrize("coordinator", [None, "apart", "Credit Agency"])
def test_vfem_by_moments_passes_the_count(vertical, coordinator, recwarn):
    model = fs.VFEMRegression.from_formula("NPGR ~ .", vertical, coordinator=coordinator)
    result = model.fit(exchange="moments")
    receipt = result.receipt()
    assert fs.verify_receipt(receipt, vertical.fingerprints).ok
    assert (receipt.released["ratio"] < 0.5).all() and receipt.alarm == ""
    assert "as many equations" not in str(result.summary()).lower()
    assert not [w for w in recwarn if issubclass(w.category, DisclosureWarning)]


@pytest.mark.filterwarnings("ignore::fedstat.errors.ConvergenceWarning")
def test_the_unmasked_iteration_of_vfem_is_flagged_after_a_dozen_rounds():
    partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    model = fs.VFEMRegression.from_formula("NPGR ~ .", partition, between="independent")
    options = {"exchange": "iterative", "iteration": fs.Iteration(masked=False), "cov_type": "none"}
    with pytest.warns(DisclosureWarning, match="rows could be computed") as caught:
        result = model.fit(**options, maxiter=12)
    assert __file__ in {w.filename for w in caught}
    receipt = result.receipt()
    assert fs.verify_receipt(receipt, partition.fingerprints).ok
    own = receipt.released.set_index("about").loc[["Market Supervision", "Judicial Organ"]]
    assert own["verdict"].eq(VERDICT_SOLVABLE).all()
    assert "Sites released as many equations as unknowns" in " ".join(str(result.summary()).split())


def test_several_fits_predictions_and_a_refused_one_in_one_session(vertical):
    model = fs.VFEMRegression.from_formula("NPGR ~ .", vertical)
    first = model.fit(exchange="moments", cov_type="none")
    first.predict(vertical)
    second = model.fit(exchange="moments")
    assert fs.verify_receipt(second.receipt(), vertical.fingerprints).ok
    assert fs.verify_receipt(first.receipt(), vertical.fingerprints).ok
    assert len(second.receipt().passed) > len(first.receipt().passed)


def test_a_receipt_comes_back_from_a_file(horizontal, vertical, tmp_path):
    glm = quietly(fs.GLORE.from_formula("y ~ x", horizontal).fit)
    vfem = fs.VFEMRegression.from_formula("NPGR ~ .", vertical).fit(exchange="moments", cov_type="none")
    for result, partition in ((glm, horizontal), (vfem, vertical)):
        result.save(tmp_path / "fit")
        loaded = fs.load(tmp_path / "fit")
        assert loaded.receipt() == result.receipt()
        loaded.receipt().save(tmp_path / "fit.json")
        assert fs.verify_receipt(tmp_path / "fit.json", partition.fingerprints).ok


def test_results_without_a_ledger_say_so(horizontal):
    result = quietly(fs.GLORE.from_formula("y ~ x", horizontal).fit)
    result._ledger.receipt = None
    with pytest.raises(NotAvailableError, match="no receipt"):
        result.receipt()
