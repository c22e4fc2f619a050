"""Random calls of all public families of sites with different rows, on tables with planted cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import statsmodels.api as sm

import fedstat as fs
from attacker.grammar import ANSWERS, FAMILIES, GROUPS, draw_terms

LINKS = sm.families.links
BOUNDS = dict.fromkeys(("z", "u", "m", "c", "y"), (0.0, 20.0)) | {"amount": (0.0, 1000.0), "s": (0, 10)}
NUMBERS = ("z", "u", "m", "c", "amount", "s")
OWN = ({}, {"local": False})


class Call(NamedTuple):
    """An analysis, as text for a report, and how it is run."""

    text: str
    run: Callable[[fs.ClientPartition], Any]


Random = np.random.Generator


def one(rng: Random, choices: Any) -> Any:
    """Draw one of several things."""
    return choices[int(rng.integers(len(choices)))]


def model(
    name: str, formula: str, given: dict[str, Any] | None = None, then: str = "", **settings: Any
) -> Call:
    """Return the fit of a model, and perhaps the call of a method of its result."""
    given = given or {}
    shown = ", ".join(f"{k}={_short(v)}" for k, v in {**settings, **given}.items())

    def run(partition: fs.ClientPartition) -> Any:
        result = getattr(fs, name).from_formula(formula, partition, **settings).fit(**given)
        return getattr(result, then)() if then else result

    return Call(f"{name} {formula} {shown} {then}".strip(), run)


def _short(value: Any) -> str:
    return type(value).__name__ if isinstance(value, sm.families.Family) else str(value)


def terms(rng: Random, answer: str, most: int = 2) -> str:
    """Draw the right side of a formula."""
    return " + ".join(draw_terms(rng, most, without=answer))


def ols(rng: Random) -> Call:
    """Least squares with weights, other errors, and what follows a fit."""
    answer = one(rng, ANSWERS)
    given = one(rng, (*OWN, {"cov_type": "HC3"}, {"cov_type": "HC0"}, {"cov_type": "HC1", "local": False}))
    settings = one(rng, ({}, {}, {"var_weights": "w"}, {"freq_weights": "k"}))
    then = one(rng, ("", "", "evaluate", "get_margeff"))
    return model("FederatedOLS", f"{answer} ~ {terms(rng, answer)}", given, then, **settings)


def clusters(rng: Random) -> Call:
    """Linear and logistic models with clustered errors."""
    name, answer = one(rng, (("FederatedOLS", "y"), ("GLORE", "e"), ("GLORE", "a")))
    by = one(rng, ("person", "g", "h"))
    given = {"cov_type": "cluster", "cov_kwds": {"groups": by}, **one(rng, OWN)}
    return model(name, f"{answer} ~ {terms(rng, answer)}", given, labels=[by])


def glm(rng: Random) -> Call:
    """Generalized linear models of all responses, canonical or not."""
    families = sm.families
    family, answer, settings = one(
        rng,
        (
            (FAMILIES["binomial"], one(rng, ("a", "e")), {}),
            (families.Binomial(LINKS.Probit()), "e", {}),
            (families.Binomial(LINKS.CLogLog()), "a", {}),
            (FAMILIES["poisson"], one(rng, ("s", "x", "k")), {}),
            (FAMILIES["poisson"], "k", {"exposure": "t"}),
            (FAMILIES["poisson"], "k", {"offset": "x"}),
            (families.Gamma(LINKS.Log()), "y", {}),
            (families.NegativeBinomial(alpha=1.0), "k", {}),
            (families.Gaussian(), "z", {"freq_weights": "k"}),
        ),
    )
    given = one(rng, (*OWN, *OWN, {"cov_type": "HC0"}, {"maxiter": 2}))
    then = one(rng, ("", "", "evaluate", "get_margeff"))
    return model("FederatedGLM", f"{answer} ~ {terms(rng, answer)}", given, then, family=family, **settings)


def glore(rng: Random) -> Call:
    """Logistic regression."""
    answer = one(rng, ("a", "e"))
    return model("GLORE", f"{answer} ~ {terms(rng, answer)}", one(rng, (*OWN, {"cov_type": "HC1"})))


def averaging(rng: Random) -> Call:
    """Federated averaging in all variants."""
    name, answer = one(rng, ("FedAvg", "FedAvgM", "FedProx", "QFedAvg")), one(rng, ("a", "e"))
    given: dict[str, Any] = {"rounds": 3} | one(rng, ({}, {"standardize": True}))
    if name == "QFedAvg":
        given |= {"masked": False}
    return model(name, f"{answer} ~ {terms(rng, answer)}", given, family=FAMILIES["binomial"])


def gee(rng: Random) -> Call:
    """Estimating equations of clusters."""
    answer, family = one(rng, (("y", None), ("e", FAMILIES["binomial"]), ("k", FAMILIES["poisson"])))
    settings = {} if family is None else {"family": family}
    structure = one(rng, ({}, {"cov_struct": "exchangeable"}, {"cov_struct": "ar1", "time": "t"}))
    formula = f"{answer} ~ {terms(rng, answer)}"
    return model("FederatedGEE", formula, one(rng, OWN), groups="person", **structure, **settings)


def mixed(rng: Random) -> Call:
    """Mixed models with and without a closed form."""
    answer, family = one(rng, (("y", None), ("y", None), ("e", FAMILIES["binomial"])))
    settings = {} if family is None else {"family": family}
    by = one(rng, ("person", "h"))
    return model("FederatedMixed", f"{answer} ~ {terms(rng, answer)} + (1 | {by})", {}, **settings)


def cox(rng: Random) -> Call:
    """Cox models with strata, late entry, clusters and other errors."""
    left = one(rng, ("Surv(t, e)", "Surv(t, e)", "Surv(entry, t, e)"))
    extra = one(rng, ("", "", " + strata(h)", " + cluster(person)"))
    given = one(rng, (*OWN, {"cov_type": "robust"}, {"ties": "breslow"}))
    then = one(rng, ("", "", "test_proportional_hazards"))
    return model("FederatedCox", f"{left} ~ {terms(rng, 't')}{extra}", given, then)


def aft(rng: Random) -> Call:
    """Accelerated failure times of several distributions."""
    given = one(rng, (*OWN, {"cov_type": "robust"}))
    distribution = one(rng, ("weibull", "lognormal", "loglogistic"))
    return model("FederatedAFT", f"Surv(t, e) ~ {terms(rng, 't')}", given, distribution=distribution)


def treatment(rng: Random) -> Call:
    """Effects of a treatment on numbers and times, of several estimands, and balance."""
    estimand = one(rng, ("ATE", "ATT", "ATC", "ATO", "matching"))
    drawn = terms(rng, "g")
    settings: dict[str, Any] = {"treatment": f"C(g) ~ {drawn}", "estimand": estimand}
    if rng.random() < 0.3:
        return model("SurvivalEffect", "Surv(t, e) ~ 1", {"grid": 5, "until": 30}, **settings)
    given = {"method": one(rng, ("ipw", "aipw", "standardization", "ipw_ra")), **one(rng, OWN)}
    answer = next(name for name in ("y", "k", "x", "c") if name not in drawn)
    settings |= one(rng, ({}, {}, {"trim": 0.1}))
    formula = f"{answer} ~ {one(rng, ('1', drawn))}"
    if rng.random() < 0.2:
        return Call(
            f"balance {formula} {settings}",
            lambda partition: fs.TreatmentEffect.from_formula(formula, partition, **settings).balance(),
        )
    return model("TreatmentEffect", formula, given, **settings)


def weighted(rng: Random) -> Call:
    """Models of rows with the weights of a treatment, or of two in turn."""
    name = one(rng, ("FederatedOLS", "FederatedGLM", "FederatedGEE", "FederatedCox"))
    left = {"FederatedCox": "Surv(t, e)", "FederatedGLM": "e"}.get(name, "y")
    settings: dict[str, Any] = {"FederatedGLM": {"family": FAMILIES["binomial"]}}.get(name, {})
    settings |= {"groups": "person"} if name == "FederatedGEE" else {}
    arms = one(rng, (("g",), ("g",), ("h",), ("g", "h")))
    formulas = [f"C({arm}) ~ {terms(rng, arm)}" for arm in arms]
    estimand, given = one(rng, ("ATE", "ATO", "matching")), one(rng, ({}, {}, {"cov_type": "robust"}))
    formula = f"{left} ~ {' + '.join(f'C({arm})' for arm in arms)}{one(rng, ('', ' + z'))}"

    def run(partition: fs.ClientPartition) -> Any:
        complete = [column for column in ("y", "e", "t", "z") if column not in " ".join(formulas)]
        treatments = [
            fs.TreatmentEffect.from_formula(
                "m ~ 1", partition, treatment=text, estimand=estimand, complete=complete
            ).balance(overlap=False)
            for text in formulas
        ]
        model = getattr(fs, name).from_formula(formula, partition, weights=treatments, **settings)
        return model.fit(**given)

    return Call(f"{name} {formula} weights of {'; '.join(formulas)} {estimand} {given}", run)


def categories(rng: Random) -> Call:
    """Ordinal and multinomial models."""
    name = one(rng, ("FederatedOrdinal", "FederatedMultinomial"))
    answer, left = (
        one(rng, (("x", "x"),)) if name == "FederatedOrdinal" else one(rng, (("g", "g"), ("x", "C(x)")))
    )
    then = one(rng, ("", "", "get_margeff", "evaluate"))
    return model(name, f"{left} ~ {terms(rng, answer)}", one(rng, ({}, {"cov_type": "HC1"})), then)


def curve(rng: Random) -> Call:
    """Curves of survival and of competing risks."""
    by = one(rng, ("1", *GROUPS))
    name, left = one(
        rng,
        (("KaplanMeier", "Surv(t, e)"), ("CumulativeIncidence", "Surv(t, C(cause, levels=[0, 1, 2]))")),
    )
    return model(name, f"{left} ~ {by}", {"grid": one(rng, (1, 3, 4)), "until": 12})


def boost(rng: Random) -> Call:
    """Boosting of linear and smooth learners."""
    answer = one(rng, ANSWERS)
    names = [n for n in rng.choice(["a", "b", "x", "z", "u", "c", "s"], 2, replace=False) if n != answer]
    return model("FedFunctionBoost", f"{answer} ~ {' + '.join(names)}", {"steps": 4})


def by_group(rng: Random) -> dict[str, Any]:
    """Draw groups of a table, or none."""
    return one(rng, ({}, {"by": one(rng, GROUPS)}))


def table_one(rng: Random) -> Call:
    """Table one of numbers and levels."""
    given = by_group(rng)
    names = [*rng.choice([*NUMBERS, "C(g)", "C(x)", "C(h)"], 2, replace=False)]
    formula = " + ".join(name for name in names if given.get("by", "-") not in name)
    given |= one(rng, ({}, {"smd": True, "pvalues": True} if given else {}))
    return Call(f"table_one {formula} {given}", lambda partition: fs.table_one(partition, formula, **given))


def quantiles(rng: Random) -> Call:
    """Quantiles, within published limits."""
    name, given = one(rng, NUMBERS), by_group(rng)
    return Call(
        f"quantiles {name} {given}",
        lambda partition: fs.quantiles(partition, name, q=[0.25, 0.5], bounds=BOUNDS, **given),
    )


def histogram(rng: Random) -> Call:
    """Histograms, within published limits."""
    name, bins = one(rng, NUMBERS), int(rng.integers(2, 7))
    return Call(
        f"histogram {name} {bins}",
        lambda partition: fs.histogram(partition, name, bins=bins, bounds=BOUNDS),
    )


def crosstab(rng: Random) -> Call:
    """Cells of two columns."""
    row, column = (str(name) for name in rng.choice(["a", "b", "g", "h", "x", "e", "s"], 2, replace=False))
    return Call(f"crosstab {row} {column}", lambda partition: fs.crosstab(partition, row, column))


def corr(rng: Random) -> Call:
    """Correlations over complete rows."""
    formula = " + ".join(rng.choice(NUMBERS, 3, replace=False))
    return Call(f"corr {formula}", lambda partition: fs.corr(partition, formula))


COMPARED = (
    "a == 1",
    "b == 0",
    "x != 2",
    "x <= 1",
    "g == 'r'",
    "g != 'r'",
    "h == 'k'",
    "s >= 5",
    "s < 10",
    "e == 0",
)


def subsets(rng: Random) -> Call:
    """Models, curves and tables over the rows for which comparisons of columns of few values hold."""
    subset = " & ".join(rng.choice(COMPARED, int(rng.integers(1, 3)), replace=False))
    kind = one(rng, ("ols", "ols", "glore", "cox", "curve", "crosstab", "table one"))
    match kind:
        case "ols":
            return model("FederatedOLS", f"y ~ {terms(rng, 'y')}", one(rng, OWN), subset=subset)
        case "glore":
            return model("GLORE", f"e ~ {terms(rng, 'e')}", one(rng, OWN), subset=subset)
        case "cox":
            return model("FederatedCox", f"Surv(t, e) ~ {terms(rng, 't')}", one(rng, OWN), subset=subset)
        case "curve":
            given = {"grid": one(rng, (1, 3, 4)), "until": 12}
            return model("KaplanMeier", f"Surv(t, e) ~ {one(rng, ('1', *GROUPS))}", given, subset=subset)
        case "crosstab":
            row, column = (str(name) for name in rng.choice(["a", "b", "g", "h", "x"], 2, replace=False))
            return Call(
                f"crosstab {row} {column} {subset}",
                lambda partition: fs.crosstab(partition, row, column, subset=subset),
            )
    names, given = " + ".join(rng.choice([*NUMBERS], 2, replace=False)), by_group(rng)
    return Call(
        f"table_one {names} {given} {subset}",
        lambda partition: fs.table_one(partition, names, subset=subset, **given),
    )


def absorbed(rng: Random) -> Call:
    """Least squares within the levels of a column."""
    by, formula = one(rng, ("person", "g", "h", "x")), f"y ~ {terms(rng, 'y')}"
    given = one(rng, (*OWN, {"cov_type": "HC1"}, {"cov_type": "cluster", "cov_kwds": {"groups": by}}))
    return model("FederatedOLS", f"{formula} | {by}", given)


SPLINES = (
    "bs(z, df=4)",
    "cr(u, df=4, constraints='center')",
    "bs(amount, df=4)",
    "cr(s, df=3, constraints='center')",
    "bs(c, df=4, degree=1)",
)


def splines(rng: Random) -> Call:
    """Splines of a column, alone or in the rows of an indicator, in models of several responses."""
    name, left, settings = one(
        rng,
        (
            ("FederatedOLS", "y", {}),
            ("GLORE", "e", {}),
            ("FederatedGLM", "k", {"family": FAMILIES["poisson"]}),
            ("FederatedCox", "Surv(t, e)", {}),
        ),
    )
    spline, rest = one(rng, ("", "", "a:")) + one(rng, SPLINES), one(rng, ("", " + a", " + x", " + b"))
    return model(name, f"{left} ~ {spline}{rest}", one(rng, OWN), **settings)


def imputed(rng: Random) -> Call:
    """Chained equations of a column that lacks cells, and a regression on the completed tables."""
    formula = f"y ~ v + {one(rng, ('z', 'a', 'x', 'a + z', 'g'))}"

    def run(partition: fs.ClientPartition) -> Any:
        made = fs.impute(partition, formula, m=2, iterations=1, seed=1)
        return made.fit(lambda one: fs.FederatedOLS.from_formula(formula, one).fit())

    return Call(f"impute {formula}", run)


# Noise is left to the tests of budgets: sites with a budget refuse exact sums, and no noisy number is a sum.
def wards(rng: Random) -> Call:
    """Iterated fits of two factors and a number."""
    right, given = f"C(g) + C(h) + {one(rng, ('z', 'u', 'w'))}", {"local": False}
    name, left, settings = one(
        rng,
        (
            ("GLORE", "e", {}),
            ("FederatedGLM", "k", {"family": FAMILIES["poisson"]}),
            ("FederatedCox", "Surv(t, e)", {}),
            ("FederatedAFT", "Surv(t, e)", {}),
            ("FederatedOrdinal", "x", {}),
            ("FederatedMultinomial", "C(x)", {}),
        ),
    )
    return model(name, f"{left} ~ {right}", given, **settings)


KINDS: dict[str, tuple[Callable[[Random], Call], tuple[str, ...]]] = {
    "ols": (ols, ("FederatedOLS",)),
    "clusters": (clusters, ("FederatedOLS", "GLORE")),
    "glm": (glm, ("FederatedGLM",)),
    "glore": (glore, ("GLORE",)),
    "averaging": (averaging, ("FedAvg", "FedAvgM", "FedProx", "QFedAvg")),
    "gee": (gee, ("FederatedGEE",)),
    "mixed": (mixed, ("FederatedMixed",)),
    "cox": (cox, ("FederatedCox",)),
    "categories": (categories, ("FederatedOrdinal", "FederatedMultinomial")),
    "curve": (curve, ("KaplanMeier", "CumulativeIncidence")),
    "boost": (boost, ("FedFunctionBoost",)),
    "table one": (table_one, ("table_one",)),
    "quantiles": (quantiles, ("quantiles",)),
    "histogram": (histogram, ("histogram",)),
    "crosstab": (crosstab, ("crosstab",)),
    "corr": (corr, ("corr",)),
    "subset": (subsets, ("FederatedOLS", "GLORE", "FederatedCox", "KaplanMeier", "crosstab", "table_one")),
    "aft": (aft, ("FederatedAFT",)),
    "treatment": (treatment, ("TreatmentEffect", "SurvivalEffect")),
    "weighted": (weighted, ("FederatedOLS", "FederatedGLM", "FederatedGEE", "FederatedCox")),
    "absorbed": (absorbed, ("FederatedOLS",)),
    "splines": (splines, ("FederatedOLS", "GLORE", "FederatedGLM", "FederatedCox")),
    "imputed": (imputed, ("impute",)),
}
"""How calls of a kind are drawn, and the public names that they use."""


def draw_call(rng: Random, kinds: tuple[str, ...] = tuple(KINDS)) -> Call:
    """Draw an analysis of a random kind."""
    return KINDS[one(rng, kinds)][0](rng)
