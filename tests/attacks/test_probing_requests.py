"""Values found by asking: texts of refusals, columns that single a person out, predictions.

Every attack is tried where nothing is protected, and has to succeed there; under the strict policy it learns
nothing but refusals, and refusals that depend on rows are counted.
"""

import json
import re

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from people import people, rows
from refusals import refused_for

import fedstat as fs
from fedstat.errors import DescriptionError, FedstatError, PolicyError
from fedstat.federation.message import Request, pack_request

pytestmark = pytest.mark.filterwarnings("ignore")

COUNT = re.compile(r"not finite for ([\d,]+) of")


def reported(partition, formula):
    """Rows at which the transform fails, as a refusal says."""
    try:
        fs.GLORE.from_formula(formula, partition).fit()
    except FedstatError as error:
        found = COUNT.search(str(error))
        return int(found[1].replace(",", "")) if found else str(error)
    return 0


def smallest_income(partition):
    """Bisect the smallest income by refusals of a logarithm."""
    low, high = 0.0, 1e6
    while high - low > 0.01:
        t = 0.5 * (low + high)
        answer = reported(partition, f"y ~ log(income - {t!r})")
        if isinstance(answer, str):
            return answer
        low, high = (low, t) if answer else (t, high)
    return high


def test_a_refusal_does_not_reveal_a_value():
    table = people()
    assert smallest_income(rows("open")) == pytest.approx(table.income.min(), abs=0.02)
    partition = rows("strict")
    answer = smallest_income(partition)
    assert "simple formulas" in answer and 'formulas = "any"' in answer
    assert sum(site.site_ledger.refusals.total() for site in partition.sites.values()) == 0


def test_one_transform_of_what_is_published_is_judged_from_the_range_alone():
    partition = rows("strict")
    fs.GLORE.from_formula("y ~ log(income) + scale(bmi) + C(sex)", partition).fit()
    with pytest.raises(DescriptionError, match="published range is not above 0"):
        fs.GLORE.from_formula("y ~ log(z)", partition)


@pytest.mark.parametrize(
    "formula",
    [
        "y ~ log(exp(z + exp(-1e4 * (age - 41) ** 2)))",
        "y ~ exp(-1e4 * (age - 41) ** 2)",
        "income > 40000 ~ age",
        "y ~ exp(scale(age))",
        "y ~ scale(age, ddof=3)",
        "y ~ poly(age, 9)",
        "y ~ age + offset(1e6 * z)",
        "cbind(y, 1 - y) ~ age",
        "y ~ log(log(income))",
    ],
)
def test_columns_chosen_by_the_analyst_are_not_computed(formula):
    partition = rows("strict")
    with pytest.raises(DescriptionError, match="its policy \\(simple formulas\\)"):
        fs.FederatedGLM.from_formula(formula, partition, family=sm.families.Binomial())
    assert not any(site.ledger.entries for site in partition.sites.values())


def products(partition, formula):
    """X'X and X'y of a normal fit, from what it prints."""
    family = sm.families.Gaussian()
    result = fs.FederatedGLM.from_formula(formula, partition, family=family).fit(masked=True)
    XX = result.scale * np.linalg.inv(result.cov_params().to_numpy())
    return XX @ result.params.to_numpy()


def test_two_fits_do_not_reveal_a_known_persons_response():
    table = people()
    person = table.groupby(["age", "sex", "bmi"]).filter(lambda g: len(g) == 1).iloc[7]
    mark = f"exp(-1e4 * ((age - {person.age})**2 + (sex - {person.sex})**2 + (bmi - {person.bmi})**2))"
    formulas = ("income ~ z", f"income ~ log(exp(z + {mark}))")
    plain, marked = (products(rows("open"), formula) for formula in formulas)
    assert marked[1] - plain[1] == pytest.approx(person.income, rel=1e-3)
    products(rows("strict"), formulas[0])
    with pytest.raises(DescriptionError, match="simple formulas"):
        products(rows("strict"), formulas[1])


def test_a_chosen_entity_is_not_asked_by_itself():
    frames = {
        "P": pd.DataFrame({"k": range(300), "y": np.arange(300.0) % 7}),
        "Q": pd.DataFrame({"k": range(300), "diagnosis": ["HIV" if i == 17 else "flu" for i in range(300)]}),
    }
    frames["Q"].loc[200:, "diagnosis"] = "none"
    texts = {}
    for policy in ("open", "strict"):
        partition = fs.ClientPartition.from_frames(frames, on="k", policy=policy)
        use = np.zeros(300, dtype=bool)
        use[17] = True
        content = {"terms": ["diagnosis"], "columns": ["diagnosis"], "partial": "drop"}
        text = json.dumps(content | {"min_count": 1, "intercept": False})
        request = Request("Q", "design", "open_block", {"use": use}, "s", text)
        with pytest.raises(FedstatError) as caught:
            partition.sites["Q"].answer(pack_request(request))
        texts[policy] = str(caught.value)
    assert "constant" in texts["open"]
    assert texts["strict"].startswith("Q: refused for a reason that depends on rows;")
    assert "constant" not in texts["strict"]


def test_refusals_that_depend_on_rows_are_counted_and_end():
    frame = people()
    frame.loc[frame.site == "S0", "y"] = 0.0
    frame.loc[0, "y"] = 1.0  # one event: refused by a rule about rows
    partition = fs.ClientPartition.from_frame(frame, by="site", policy="strict")
    texts = set()
    for _ in range(12):
        with pytest.raises(PolicyError) as caught:
            fs.GLORE.from_formula("y ~ age", partition).fit()
        texts.add(str(caught.value))
    silent, refused = sorted(texts, key=lambda text: "refused for" in text)
    assert refused.startswith("S0: refused for a reason that depends on rows;")
    assert "(maximum refusals)" in silent and "answer-again" in silent
    site = partition.sites["S0"]
    assert site.site_ledger.refusals[""] == 10 and len(site.refusals.reasons) == 10
    assert "requires no rows or at least 3 rows" in site.refusals.reasons[0]
    site.site_ledger.set_refusals("", 0)
    with refused_for("minimum events"):
        fs.GLORE.from_formula("y ~ age", partition).fit()


def test_columns_do_not_leave_by_predictions():
    frames = fs.datasets.load_sme()
    for policy in ("open", "strict"):
        partition = fs.ClientPartition.from_frames(frames, on="enterprise_id", policy=policy)
        small = fs.VFEMRegression.from_formula("NPGR ~ EMP + ASC + FOI", partition).fit().refit("NPGR ~ EMP")
        if policy == "strict":
            with pytest.raises(PolicyError, match="per entity"):
                small.predict(partition)
            continue
        predicted = small.predict(partition)
        a, b = small.params
        column = (getattr(predicted, "predicted_mean", predicted) - a) / b
        owner = next(frame for frame in frames.values() if "EMP" in frame).set_index("enterprise_id")["EMP"]
        both = column.index.intersection(owner.dropna().index)
        assert np.allclose(column[both], owner[both])
