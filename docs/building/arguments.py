"""The page of arguments: every argument of ``from_formula`` and ``fit``, side by side for all models.

``python docs/building/arguments.py`` writes ``docs/arguments.md``. Defaults come from the signatures;
meanings and reasons for different defaults are here.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import fedstat as fs

PAGE = Path(__file__).parents[1] / "arguments.md"
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "GLM": ("FederatedGLM", "GLORE", "FederatedOLS"),
    "GEE": ("FederatedGEE",),
    "Cox": ("FederatedCox",),
    "AFT": ("FederatedAFT",),
    "Treatment": ("TreatmentEffect", "SurvivalEffect"),
    "KaplanMeier": ("KaplanMeier", "CumulativeIncidence"),
    "Categories": ("FederatedOrdinal", "FederatedMultinomial"),
    "Mixed": ("FederatedMixed",),
    "FedAvg": ("FedAvg", "FedAvgM", "QFedAvg", "FedProx"),
    "Boost": ("FedFunctionBoost",),
    "VFEM": ("VFEMRegression",),
    "VFEMGLM": ("VFEMGLM",),
    "VerticalGLM": ("VerticalGLM",),
    "LASER": ("LASER",),
    "M2SEM": ("M2SEM",),
    "CopulaGLM": ("PrivateCopulaGLM",),
    "Synthesizer": ("CopulaSynthesizer",),
}
"""Columns of the tables, with their models. Models of one column share defaults; some have more arguments."""
NONE = "–"
MEANINGS: Mapping[str, Mapping[str, str]] = {
    "from_formula": {
        "formula": "Response and terms.",
        "partition": "The sites and their data.",
        "family": "Distribution and link of the response, as a family of statsmodels.",
        "distribution": "Distribution of times.",
        "treatment": "Treatment and terms of the propensity model.",
        "estimand": "Population of the effect.",
        "propensity": "Whether sites have one propensity model, or own intercepts or models.",
        "link": "Link of the propensity model.",
        "target": "Site whose rows are the population of the effect.",
        "trim": "Smallest probability of an arm with which a row counts.",
        "distr": "Distribution of the latent variable of ordered categories.",
        "levels": "Categories of the response, in order.",
        "offset": "Column with a known part of the linear predictor.",
        "exposure": "Column whose logarithm is an offset.",
        "freq_weights": "Column with the number of rows or entities that a row represents.",
        "var_weights": "Column by which the variance of the response is divided.",
        "labels": "Columns of clusters, strata or persons.",
        "reml": "Whether variances maximize the restricted likelihood.",
        "nagq": "Nodes of quadrature over a random effect.",
        "check_knots": "Sum products for twice as many knots, and test by them whether knots are too few.",
        "complete": "Columns that rows must have, although they are not in the model.",
        "missing": "What happens to rows or entities that lack values.",
        "subset": "Comparisons that hold for the rows that are used.",
        "between": "Whether columns of two sites may be correlated.",
        "coordinator": 'The site of the coordinator, or `"apart"`.',
        "penalty": "Kind of penalty.",
        "a": "Shape of SCAD and MCP.",
        "l1_ratio": "Share of the selecting part of the penalty; the rest is ridge.",
        "adaptive": "Power of the weights of an adaptive penalty.",
        "group_terms": "Whether the columns of a term are selected together.",
        "unpenalized": "Columns or terms without a penalty.",
        "time": "Basis along a response curve; GEE: column by which rows of a cluster are ordered.",
        "groups": "Column that names the clusters.",
        "cov_struct": "Working correlation within clusters.",
        "weights": "Weights of rows: of a fitted treatment; for GEE and effects of treatments a column.",
        "loss": "Robust loss that replaces a family.",
        "q": 'Level of the quantile with `loss="quantile"`.',
        "epsilon": "Differential privacy of the record of one entity.",
        "delta": "Probability that goes with epsilon; without epsilon, the limit of Huber's loss.",
        "bounds": "Public ranges and levels of the columns.",
        "public": "Public descriptions of curves and columns.",
        "columns": "Columns that take part.",
        "mechanism": "The private release, or a simulation of the published one.",
        "outcome": "Kind of the response.",
        "hidden": "Units of the hidden layers of a site's network.",
        "width": "Outputs of a site's network.",
        "head_hidden": "Units of the hidden layers of the head.",
        "heads": "One head, or one for each site.",
        "representations": "Modules that replace the networks of some sites.",
        "n_clusters": "Number of clusters.",
        "n_factors": "Number of factors of a modality.",
        "modalities": "Columns of a site that share factors.",
        "adjust": "Covariates that clusters do not reflect.",
        "continuous": "Columns that are continuous.",
        "ordinal": "Columns that are ordered categories.",
        "nominal": "Columns that are categories without an order.",
    },
    "fit": {
        "method": "Variant of the fit, or the estimator.",
        "exchange": "What the sites exchange during the fit.",
        "iteration": 'Options of `exchange="iterative"`, with its own `masked`, `tol` and `learning_rate`.',
        "cov_type": "Kind of standard errors.",
        "cov_kwds": "Columns of clusters and strata for `cov_type`, and the correction of clustered errors.",
        "baseline": "Whether sites have baseline hazards of their own, or one.",
        "grid": "Width of intervals of time, or their ends.",
        "until": "Last time of a grid of equal widths.",
        "times": "Times at which curves have standard errors.",
        "ties": "Treatment of events at the same time.",
        "scale": "Scale of the variance, or its estimator.",
        "dispersion": "Whether the dispersion of negative binomial counts is estimated.",
        "use_t": "Whether tests use Student's t.",
        "correction": "Correction for small samples or skewed columns.",
        "rounds": "Number of rounds, which are all run; there is no test of convergence.",
        "maxiter": "Largest number of iterations; the fit stops before if it converges.",
        "tol": "Tolerance of the test of convergence.",
        "steps": "Number of steps of the algorithm, which are all taken.",
        "learning_rate": "Length of a step.",
        "epochs": "Passes over all training entities.",
        "local_epochs": "Passes of a site over its rows in one round.",
        "local_steps": "EM steps of a site in one round.",
        "batch_size": "Rows or entities of one gradient step.",
        "fraction": "Share of the sites that takes part in a round.",
        "momentum": "Share of the previous move (FedAvgM).",
        "dampening": "Share by which the update is reduced (FedAvgM).",
        "q": "Fairness (QFedAvg).",
        "lipschitz": "Lipschitz constant of the gradients (QFedAvg).",
        "mu": "Weight of the proximal term (FedProx).",
        "gamma": "Inexactness of a site's solution (FedProx).",
        "average": "Weights of sites in the average (FedProx).",
        "standardize": "Whether columns are standardized before the algorithm runs.",
        "compress": "Whether columns with heavy tails enter as asinh of robust units.",
        "init": "Starting coefficients.",
        "n_init": "Number of starts by k-means.",
        "starts": "Whether clusters of single sites are starts as well.",
        "check_assumptions": "Test the assumptions of the model with the fit, and announce tests that fail.",
        "local": "Whether each site also fits its own rows.",
        "masked": "Whether pairwise masks hide each site's part of a sum.",
        "epsilon": "Differential privacy of one row added or removed: sums have noise, charged to budgets.",
        "delta": "Probability that goes with epsilon.",
        "bounds": "Public ranges and levels of the columns, for epsilon.",
        "seed": "Seed of starts, folds, batches or simulations; noise and masks never depend on it.",
        "select": "Criterion that selects the model.",
        "lam": "A single penalty.",
        "lambdas": "The penalties of the path.",
        "n_lambdas": "Number of penalties of the path.",
        "ratio": "Smallest penalty of the path, relative to the largest.",
        "algorithm": "Algorithm for SCAD and MCP.",
        "path": "Whether all fits of the path are solved.",
        "inference": "Kind of intervals after the selection.",
        "splits": "Number of repeated splits.",
        "folds": "Number of random parts for cross-validation.",
        "draws": "Number of repeated subsamples or simulated releases.",
        "half_samples": "Number of random halves for selection frequencies.",
        "offset": "Curve from which boosting starts.",
        "every": "Steps between two exchanges with the sites.",
        "aggregation": "How the fits of the sites are combined.",
        "paper": "Whether the defaults of the publication apply.",
        "decay": "L2 penalty of Adam.",
        "balanced": "Whether all classes have the same weight.",
        "validation": "Share of the entities that selects the epoch.",
        "calibration": "Share of the entities that calibrates prediction sets.",
        "label_epsilon": "Differential privacy of the labels.",
        "checkpoint": "File that stores the training after every epoch.",
        "cross_products": "Source of products of two sites' columns.",
        "sketch": "Kind of random projection.",
        "sketch_size": "Rows of the random projection.",
        "memory": "Number of earlier steps that shape the next one.",
        "max_moved": "Largest share of entities in patterns that are too small.",
        "estimator": "How coefficients follow from the release.",
        "polish": "Steps on the score of the rows after the release.",
        "progress": "Whether progress is reported.",
    },
}
REASONS: Mapping[str, Mapping[str, str]] = {
    "from_formula": {
        "missing": (
            "The horizontal layout leaves out incomplete rows with a warning, as statsmodels does. In the"
            " vertical layout, an entity without a response often signals a key that does not match, and "
            "therefore raises an error; missing blocks are part of the model there. The synthesizer has no "
            "response: its `missing` chooses the method for missing blocks."
        ),
        "penalty": "Boosting smooths with its penalty; VerticalGLM selects or shrinks coefficients with it.",
        "delta": (
            "Under privacy the default is 1e-6 in all models. Boosting without epsilon has another delta:"
            " the limit of Huber's loss, in units of the response."
        ),
        "epsilon": "Required by private models; without it, boosting is not private.",
        "time": "Boosting: a curve needs a basis. GEE: an order is needed by AR(1) alone.",
    },
    "fit": {
        "method": "The variants are those of each model; the synthesizer has one only for simulations.",
        "exchange": (
            "VFEM needs sums by missing pattern, VerticalGLM products of all columns. Both are exchanged "
            "once; the other choice of each takes many rounds of row-level values."
        ),
        "cov_type": (
            "The default is the inverse of the information: GLM has statsmodels' name for it, the models "
            "with missing data distinguish the observed from the expected information."
        ),
        "rounds": "`None` in GLM: the fit runs until it converges.",
        "maxiter": (
            "An iteration costs a round of messages in GLM, VFEMGLM and M2SEM. VFEM computes its "
            'iterations at the coordinator, and VerticalGLM has a limit only for `exchange="admm"`.'
        ),
        "tol": (
            "Each tolerance has the unit of its algorithm: Newton's step in standard errors (GLM), the "
            "relative score (VFEM, VFEMGLM), stationarity relative to the largest penalty (VerticalGLM: "
            '1e-7; 1e-5 for `exchange="admm"`).'
        ),
        "learning_rate": (
            "The algorithms need different step lengths: .05 for gradient steps, .1 for boosting (.2 under "
            "privacy), .005 for Adam."
        ),
        "batch_size": "LASER: 1,024, or an eighth of the entities.",
        "standardize": (
            "FedAvg runs on the columns as they are, as published; the scale of columns matters for Adam "
            "and for LASER's weight decay."
        ),
        "select": "Boosting takes all steps by default; the others select by BIC.",
        "folds": 'VerticalGLM: used only with `select="cv"` and `draws`. Boosting: ten with `select="cv"`.',
        "draws": (
            "VerticalGLM computes selection frequencies on request; standard errors of CopulaGLM need draws."
        ),
    },
}
HEAD = """# Arguments of all models

An argument has the same meaning in all models, and the same default wherever that makes sense. The tables
list the defaults side by side; the reasons for different ones follow. `None` means that the model
chooses: its reference says how. A dash means that the model has no such argument.

VFEM is `VFEMRegression`, Boost `FedFunctionBoost`, CopulaGLM `PrivateCopulaGLM`, and Synthesizer
`CopulaSynthesizer`. The column GLM is for `FederatedGLM`, `GLORE` and `FederatedOLS`; FedAvg is for
`FedAvg`, `FedAvgM`, `QFedAvg` and `FedProx`.

An argument that a model does not have is an error. The error names the argument that is probably meant:
`fit(random_state=1)` suggests `seed`, and `fit(max_iter=100)` suggests `maxiter`.
"""
TAIL = """
## Masks

`masked=None` is the default of all models that add up parts of sites. Masks then apply if they hide a
part from every other site: with at least three sites, and with two if an owner requires it. VFEM, VFEMGLM
and VerticalGLM add up row-level values. They apply masks with two sites as well: the coordinator then
receives sums instead of one value per row and site. LASER applies masks by default only to methods with
one network per site.

## Exchange

`exchange` of a fit is what the sites exchange during this fit. It is not the folder through which
messages travel; a site and a federation name that folder in their own files ([running
sites](running.md)).

## Names with two meanings

* `delta` and `epsilon` are those of differential privacy. Only `loss="huber"` of boosting has another
  `delta`, the residual at which the loss becomes linear.
* `offset` of `from_formula` is a column, `offset` of boosting's `fit` the curve from which boosting
  starts.
* `q` is the level of a quantile in boosting, and fairness in QFedAvg.
* `penalty` smooths in boosting, and selects columns in VerticalGLM.
* `alpha` is one minus the level of intervals and sets, in methods of results. No fit has it.
"""


def call_of(model: str, call: str) -> Callable[..., object]:
    """Return a call of a model; the constructor of one that has no formula."""
    found = getattr(fs, model)
    return getattr(found, call, found) if call == "from_formula" else getattr(found, call)


def defaults(models: tuple[str, ...], call: str) -> dict[str, str]:
    """Defaults by argument of models that share them."""
    found: dict[str, str] = {}
    for model in models:
        for name, one in inspect.signature(call_of(model, call)).parameters.items():
            if name == "self":
                continue
            shown = "required" if one.default is one.empty else f"`{shorten(one.default)}`"
            if found.setdefault(name, shown) != shown:
                raise ValueError(f"{name} has several defaults in {', '.join(models)}")
    return found


def shorten(value: object) -> str:
    """Write a default as a user does."""
    return (
        f'"{value}"'
        if isinstance(value, str)
        else f"{value:g}".replace("e-0", "e-")
        if isinstance(value, float)
        else repr(value)
    )


def table(call: str) -> dict[str, list[str]]:
    """Defaults by argument, in the order of the meanings; a dash for models without the argument."""
    columns = [defaults(models, call) for models in COLUMNS.values()]
    names = dict.fromkeys([*MEANINGS[call], *(name for column in columns for name in column)])
    return {name: [column.get(name, NONE) for column in columns] for name in names}


def differing(call: str) -> list[str]:
    """Arguments whose defaults differ between models."""
    return [name for name, row in table(call).items() if len(set(row) - {NONE}) > 1]


def section(call: str) -> Iterator[str]:
    """Lines of the section on one call."""
    yield from ("", f"## `{call}`", "")
    yield f"| argument | meaning | {' | '.join(COLUMNS)} |"
    yield "|---" * (2 + len(COLUMNS)) + "|"
    for name, row in table(call).items():
        yield f"| `{name}` | {MEANINGS[call][name]} | {' | '.join(row)} |"
    yield from ("", f"### Defaults of `{call}` that differ", "")
    yield from (f"* `{name}`: {REASONS[call][name]}" for name in differing(call))


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD.rstrip(), *section("from_formula"), *section("fit")]) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
