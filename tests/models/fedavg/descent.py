"""The oracles: gradient descent on all rows together, and the published algorithms, in numpy."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pandas as pd
import statsmodels.api as sm
from formulaic import model_matrix

import fedstat as fs
from fedstat.errors import ConvergenceWarning

F = sm.families
WHOLE = {"batch_size": None, "local_epochs": 1}
SITES = ("S0", "S1", "S2", "S3")


def table(n=400, seed=0):
    """Rows of four sites that differ in size, covariates and the effect of x."""
    rng = np.random.default_rng(seed)
    site = rng.choice(SITES, size=n, p=(0.1, 0.2, 0.3, 0.4))
    shift = pd.Series(site).str[1:].astype(float).to_numpy()
    frame = pd.DataFrame({"site": site, "x": rng.normal(0.3 * shift, 1.0), "z": rng.normal(1.0, 0.5, n)})
    frame["g"] = rng.choice(["a", "b"], size=n)
    frame["days"] = rng.integers(50, 200, n).astype(float)
    frame["w"] = rng.integers(1, 4, n).astype(float)
    eta = 0.2 + 0.3 * shift * frame["x"] - 0.4 * frame["z"] + 0.3 * (frame["g"] == "b")
    frame["gauss"] = eta + rng.normal(scale=2.0, size=n)
    frame["binary"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["n"] = rng.integers(1, 8, n)
    frame["events"] = rng.binomial(frame["n"], 1 / (1 + np.exp(-eta)))
    frame["count"] = rng.poisson(np.exp(0.3 * eta) * frame["days"] / 100)
    frame["gamma"] = rng.gamma(3.0, np.exp(0.3 * eta) / 3.0) + 0.05
    return frame


FRAME = table()


def partition(frame=FRAME):
    return fs.ClientPartition.from_frame(frame, by="site")


def model(kind, formula="binary ~ x + z + C(g)", frame=FRAME, **known):
    return kind.from_formula(formula, partition(frame), **known)


def run(one, **options):
    """Fit, whether or not the estimate is near the maximum."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return one.fit(**{"seed": 1} | options)


def fit(kind, *, formula="binary ~ x + z + C(g)", frame=FRAME, known=None, **options):
    """Make a model and fit it."""
    return run(model(kind, formula, frame, **(known or {})), **options)


class Pooled:
    """A model of statsmodels on the rows of all sites, and one for each site."""

    def __init__(self, response, right, family, frame=FRAME, *, offset=None, weights=None):
        exog = pd.DataFrame(np.asarray(model_matrix(right, frame)))
        self.X, self.site = exog.to_numpy(), frame["site"].to_numpy()
        endog = frame[response].to_numpy() if isinstance(response, str) else response
        self.weights = np.ones(len(frame)) if weights is None else np.asarray(weights, dtype=float)
        trials = endog.sum(axis=1) if endog.ndim == 2 else np.ones(len(frame))
        self.rows_of = self.weights * trials
        known = {"freq_weights": self.weights} | ({} if offset is None else {"offset": offset})
        self.models = {site: self._glm(endog, family, known, self.site == site) for site in SITES}
        self.all = self._glm(endog, family, known, np.ones(len(frame), dtype=bool))
        self.rows = {site: self.rows_of[self.site == site].sum() for site in SITES}

    def _glm(self, endog, family, known, at):
        # trials are kept in the family
        columns = {name: np.asarray(column)[at] for name, column in known.items()}
        return sm.GLM(endog[at], self.X[at], copy.deepcopy(family), **columns)

    def gradient(self, beta, site):
        """Gradient of the mean loss of one site."""
        return -self.models[site].score(beta, scale=1.0) / self.rows[site]

    def loss(self, beta, site):
        """Half the mean deviance of one site."""
        one = self.models[site]
        deviance = one.family.deviance(one.endog, one.predict(beta), freq_weights=one.freq_weights)
        return deviance / (2 * self.rows[site])

    def descend(self, rounds, learning_rate):
        """Gradient descent on the mean loss of all rows."""
        beta = np.zeros(self.X.shape[1])
        for _ in range(rounds):
            beta = beta + learning_rate * self.all.score(beta, scale=1.0) / self.rows_of.sum()
        return beta
