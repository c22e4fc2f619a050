"""Sums of powers of few rows: Newton's identities give the values, and masks leave the sum over sites.

``poly(x, d)`` needs the sums of P_k^2 and x P_k^2 over all rows, of orthogonal polynomials that the
coordinator knows: a site's own give its power sums up to 2 d, and these are those of one set of values.
"""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from refusals import refused_for
from wiretap import TappedEngine, Wire

import fedstat as fs
from fedstat.errors import DescriptionError
from fedstat.federation.crypto.masks import unmask_sums
from fedstat.federation.disclosure.policy import Policy

pytestmark = pytest.mark.filterwarnings("ignore")

SITES, N, DEGREE = ("S0", "S1", "S2"), 8, 10


def table(n=N):
    rng = np.random.default_rng(6)
    x = np.round(rng.normal(50, 9, 3 * n), 1)
    return pd.DataFrame({"site": np.repeat(SITES, n), "x": x, "y": rng.normal(size=3 * n)})


def model(policy, right=f"poly(x, {DEGREE})", frame=None):
    """A model, and what the coordinator heard while it was made."""
    partition = fs.ClientPartition.from_frame(table() if frame is None else frame, by="site", policy=policy)
    wire = Wire()
    with pytest.MonkeyPatch.context() as patch:
        engine = TappedEngine(partition.sites, wire)
        patch.setattr(fs.ClientPartition, "engine", property(lambda self: engine))
        made = fs.FederatedGLM.from_formula(f"y ~ {right}", partition, family=sm.families.Gaussian())
    return made, wire


def read(array):
    """One site's sums as they came: where they are masked, as if nothing hid them."""
    return array if array.dtype == np.float64 else np.asarray(read_alone(array), dtype=np.float64)


def read_alone(array):
    try:
        return unmask_sums({"sums": [array]})["sums"]
    except Exception:  # masks that do not cancel raise an error
        return np.full((1, 3), np.nan)


def rows_of_a_site(wire, state, site):
    """The site's values from its sums, (n,): powers, elementary symmetric polynomials, roots."""
    alpha, norms = (np.array(list(state[key].values())) for key in ("alpha", "norms2"))
    sd = np.sqrt(norms[1] / norms[0])
    power, before, P = [], np.array([0.0]), np.array([1.0])  # in u = (x - alpha_0) / sd, ascending
    for k, sums in enumerate(read(array) for array in wire.sent_by(site, "transform_sums", "sums")):
        size = sd ** (2 * k) / 2.0 ** (k * round(np.log2(norms[1] / norms[0])) if k > 1 else 0)
        even = sums[0, 1] / size
        odd = (sums[0, 2] - alpha[0] * sums[0, 1]) / size / sd
        square = np.convolve(P, P)
        for value, ahead in ((even, square), (odd, np.append(0.0, square)))[: 1 if k == len(alpha) else 2]:
            low = ahead[:-1] @ np.array(power[: len(ahead) - 1]) if len(ahead) > 1 else 0.0
            power.append((value - low) / ahead[-1])
        if k < len(alpha):
            beta = norms[k] / norms[k - 1] / sd**2 if k else 0.0
            following = np.append(0.0, P) - np.pad((alpha[k] - alpha[0]) / sd * P, (0, 1))
            following[: len(before)] -= beta * before
            before, P = P, following
    e = [1.0]
    for k in range(1, N + 1):
        e.append(sum((-1) ** (i - 1) * e[k - i] * power[i] for i in range(1, k + 1)) / k)
    if not np.isfinite(e).all():
        return np.full(N, alpha[0])  # nothing but the mean of all is known
    return np.sort(np.roots([(-1) ** k * v for k, v in enumerate(e)]).real) * sd + alpha[0]


def error(policy):
    made, wire = model(policy)
    state, frame = made.agreement.spec.state[f"poly(x, {DEGREE})"], table()
    found = [rows_of_a_site(wire, state, site) for site in SITES]
    truth = [np.sort(frame.x[frame.site == site]) for site in SITES]
    return max(
        np.linalg.norm(one - true) / np.linalg.norm(true - true.mean())
        for one, true in zip(found, truth, strict=True)
    )


def test_sums_of_a_site_are_its_values_and_masked_ones_are_not():
    assert error(Policy(max_parameters=5.0)) < 0.05
    loose = Policy.strict(max_parameters=5.0, formulas="any", max_column_sums="any")
    assert error(loose) > 0.5
    _, wire = model(loose)
    heard = [reply.arrays["sums"] for request, reply in wire.passed if request.step == "transform_sums"]
    assert heard and all(array.dtype != np.float64 for array in heard)


def test_a_degree_is_far_below_the_rows_of_a_site():
    with pytest.raises(DescriptionError, match="polynomials have at most degree 3"):
        model(Policy.strict())
    with pytest.raises(DescriptionError, match="maximum sums of one column"):
        model(Policy.strict(formulas="any"), f"poly(x, {DEGREE})")
    any_sums = Policy.strict(formulas="any", max_column_sums="any")
    for policy, degree in ((any_sums, DEGREE), (Policy.strict(), 2), (Policy(), 2)):
        with refused_for("maximum parameters per row"):
            model(policy, f"poly(x, {degree})")
    model(Policy.strict(), "poly(x, 3)", table(25))


@pytest.mark.parametrize("size", [1e-7, 1.0, 1e9])
def test_masked_transforms_are_those_of_the_stacked_table(size):
    """Sums of sixth powers of any size pass the masks."""
    frame = table(40)
    u, v, w = np.random.default_rng(1).normal(size=(3, len(frame)))
    frame = frame.assign(x=frame.x * size, u=u + 3.0, v=v, w=w + 1e6)
    right = "poly(x, 3) + scale(w) + center(v):scale(u, center=False)"
    found, loose = (
        model(policy, right, frame)[0] for policy in (Policy.strict(formulas="any"), Policy.open())
    )
    for text, state in loose.agreement.spec.state.items():
        for key, value in state.items():
            flat, expected = (
                np.array(list(one.values()) if isinstance(one, dict) else one, dtype=float)
                for one in (found.agreement.spec.state[text][key], value)
            )
            np.testing.assert_allclose(flat, expected, rtol=1e-9, atol=1e-12 * size)
    ledger = found.fit().ledger.to_frame()
    assert ledger.loc[(ledger.step == "transform_sums") & (ledger.array == "sums"), "masked"].all()
    assert "center() need" not in str(found.fit().summary())
    np.testing.assert_allclose(found.fit().params, loose.fit().params, rtol=1e-6, atol=1e-9)


def test_two_strict_sites_say_so_before_anything_is_summed():
    frame = table(40).query("site != 'S2'")
    with pytest.raises(DescriptionError, match='two_sites = "warn"'):
        model(Policy.strict(), "scale(x)", frame)
    model(Policy.strict(two_sites="warn"), "scale(x)", frame)
