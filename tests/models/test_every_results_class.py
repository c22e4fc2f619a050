"""Every public results class prints, exports and documents itself in the same way."""

from __future__ import annotations

import inspect

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from statsmodels.genmod import families

import fedstat as fs
from fedstat.inference.summary import MOST_NOTES, SEVERITIES, Note, Report
from fedstat.inference.tables import Sheet
from fedstat.models.results import CoefficientResults

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = {
    "FederatedOLS": "num ~ age",
}
"""Models over rows whose fit needs no argument."""
BROOM = ["estimate", "std_error", "statistic", "p_value", "conf_low", "conf_high"]
PUBLIC = {name: getattr(fs.results, name) for name in fs.results.__all__}
CLASSES = {name for name, kind in PUBLIC.items() if hasattr(kind, "summary")}


def rows():
    return fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")


def columns():
    return fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")


def blocks():
    return fs.datasets.make_blocks(600, missing=[0.0, 0.0, 0.0], seed=1)


def vertical():
    data = blocks()
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    fit = fs.VerticalGLM.from_formula("y ~ .", partition).fit(n_lambdas=8, inference="debiased")
    return [fit, fit.refit, fit.debiased]


def clusters():
    data = fs.datasets.make_clusters(200, ["continuous", "ordinal"], p=3, seed=1)
    first = data.frames["Client 1"]
    first["cost"] = data.labels.to_numpy() + first["c1_1"] / 10
    partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    formula = "~ c1_1 + c1_2 + c1_3 + c2_1 + c2_2 + c2_3"
    fit = fs.M2SEM.from_formula(formula, partition, n_clusters=2, n_factors=1).fit(select=None, n_init=1)
    search = fs.M2SEM.search(partition, n_clusters=[1, 2], n_factors=[1], n_init=1)
    return [fit, fit.bootstrap(4), fit.outside("cost"), search]


def copulas():
    table = fs.datasets.make_hospitals()[["age", "sex"]].dropna()
    held, budget = {"A": ["age"], "B": ["sex"]}, fs.Policy(privacy=fs.Budget(epsilon=60.0, delta=1e-6))
    partition = fs.ClientPartition.from_frame(table, columns=held, policy=budget)
    bounds = {"age": (20, 80), "sex": [0, 1]}
    model = fs.CopulaSynthesizer(partition, 3.0, bounds)
    data = fs.datasets.make_blocks(300, seed=1)
    simulated = fs.ClientPartition.from_frames(data.frames, on=data.key)
    published = fs.CopulaSynthesizer(simulated, 1.0, mechanism="published").fit("vcds", seed=1)
    glm = fs.PrivateCopulaGLM.from_formula("age ~ sex", partition, epsilon=50.0, bounds=bounds)
    return [model.fit(), fs.audit(model, releases=100, seed=1), published, glm.fit(draws=20)]


def analyses():
    rng = np.random.default_rng(0)
    tables = [pd.DataFrame(rng.normal(size=(50, 2)), columns=["y", "x"]) for _ in range(3)]
    fits = [smf.ols("y ~ x", table).fit() for table in tables]
    return [fs.pool(fits), fs.combine(fits), fs.meta([0.1, 0.4, 0.3], [0.2, 0.1, 0.1])]


def over_rows():
    fit = fs.GLORE.from_formula("num > 0 ~ age + sex", rows()).fit()
    between = fit.heterogeneity
    wards = fs.datasets.make_hospitals().assign(ward=lambda table: table.index // 4)
    by_ward = fs.ClientPartition.from_frame(wards, by="hospital")
    averaged = fs.FedAvg.from_formula("num > 0 ~ age + sex", rows(), family=families.Binomial())
    return [
        fit,
        fit.evaluate(),
        fit.get_margeff(),
        between,
        between.random_effects_of(["age", "sex"]),
        *(getattr(fs, model).from_formula(formula, rows()).fit() for model, formula in PLAIN.items()),
        averaged.fit(rounds=2),
        fs.FederatedGEE.from_formula("num ~ age", by_ward, groups="ward").fit(),
    ]


def survival():
    partition = fs.ClientPartition.from_frame(fs.datasets.make_survival(), by="hospital")
    fit = fs.FederatedCox.from_formula("Surv(months, died) ~ age + C(arm)", partition).fit()
    curves = fs.KaplanMeier.from_formula("Surv(months, died) ~ arm", partition).fit(grid=1, until=60)
    competing = fs.CumulativeIncidence.from_formula(
        "Surv(months, C(died, levels=[0, 1])) ~ arm", partition
    ).fit(grid=1, until=60)
    table = fs.table_one(partition, "age + C(stage)", by="arm")
    baseline, evaluation = fit.baseline_hazard(12, until=48), fit.evaluate(times=[12, 24])
    return [fit, fit.test_proportional_hazards(), baseline, evaluation, curves, competing, table]


def categories():
    ordinal = fs.FederatedOrdinal.from_formula("num ~ age + sex", rows()).fit()
    multinomial = fs.FederatedMultinomial.from_formula("C(cp) ~ age", rows()).fit()
    return [ordinal, multinomial, ordinal.test_proportional_odds(), ordinal.evaluate()]


def mixed():
    partition = fs.ClientPartition.from_frame(fs.datasets.make_repeated(4), by="hospital")
    return [fs.FederatedMixed.from_formula("score ~ month + (1 + month | patient)", partition).fit()]


def boosted():
    model = fs.FedFunctionBoost.from_formula("num ~ age + sex", rows())
    fit = model.fit(steps=20)
    return [fit, fit.refit(), model.fit(steps=5, aggregation="local")]


def networks():
    fit = fs.LASER.from_formula("NPGR > 0 ~ ROA + CI", columns()).fit(epochs=2)
    return [fit, fit.calibration]


def over_columns():
    binary = fs.VFEMGLM.from_formula("NPGR > 0 ~ ROA + CI", columns(), family=families.Binomial())
    imputations = fs.impute(columns(), "NPGR ~ ROA + CI", m=2)
    return [fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", columns()).fit(), binary.fit(), imputations]


MAKERS = (
    over_rows,
    survival,
    categories,
    mixed,
    over_columns,
    vertical,
    boosted,
    networks,
    clusters,
    copulas,
    analyses,
)


@pytest.fixture(scope="module")
def results():
    return [result for make in MAKERS for result in make()]


def test_the_walk_meets_every_results_class(results):
    made = {type(result).__name__ for result in results}
    assert CLASSES - made == {"Results", "CoefficientResults"} and made <= CLASSES


def test_each_has_notes_diagnostics_tidy_glance_and_a_summary_with_a_title(results):
    for result in results:
        name = type(result).__name__
        assert isinstance(result, Report), name
        table = result.diagnostics()
        assert (
            list(table) == ["kind", "severity", "note", "values"] and table["note"].tolist() == result.notes
        )
        ranks = [SEVERITIES.index(severity) for severity in table["severity"]]
        assert ranks == sorted(ranks) and table["kind"].str.fullmatch("[a-z_]+").all(), name
        assert isinstance(result.tidy(), pd.DataFrame) and len(result.tidy()) > 0, name
        assert result.glance().shape[0] == 1 and result.glance().shape[1] > 1, name
        summary = result.summary(title="Our title")
        text = summary.as_text()
        assert "Our title" in text and "Our title" not in result.summary().as_text(), name
        assert "title" in inspect.signature(result.summary).parameters
        critical = table.loc[table["severity"] == "critical", "note"].tolist()
        others = result.notes[len(critical) :]
        assert list(summary.headlines) == [f"*** {note} ***" for note in critical], name
        assert list(summary.notes) == others[:MOST_NOTES], name
        assert ("diagnostics()" in summary.more) == (len(others) > MOST_NOTES), name


def test_coefficients_have_brooms_columns_and_a_site_where_there_is_one(results):
    for result in results:
        if isinstance(result, CoefficientResults):
            frame, with_site = result.tidy(), any(result.estimate.sites)
            assert list(frame) == ["term", *(["site"] if with_site else []), *BROOM], type(result)
            assert frame["term"].tolist() == list(result.estimate.names)


class Many(Report):
    """A result with a note of each severity, the least severe first, and nine more."""

    def _summary_notes(self):
        yield from (Note(f"info_{i}", f"fact {i}") for i in range(9))
        yield Note("watch", "look at this", "warning")
        yield Note("stop", "NOT CONVERGED", "critical")

    def _sheets(self):
        yield Sheet(("x",), (("1",),), "l", (40,), "A title")


def test_the_most_severe_notes_lead_and_the_rest_is_in_the_diagnostics():
    text = Many().summary().as_text().splitlines()
    assert text[0] == "*** NOT CONVERGED ***" and "[1] look at this" in text and "[8] fact 6" in text
    assert "fact 7" not in "".join(text) and text[-1] == "2 more notes: see diagnostics()."
    assert len(Many().diagnostics()) == 11
    for rendered in (Many().summary().as_html(), Many().summary().as_latex(), Many().summary().as_csv()):
        assert "NOT CONVERGED" in rendered and "2 more notes: see diagnostics()." in rendered
