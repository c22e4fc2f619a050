"""The observed-data log-likelihood of VFEM with a binary or count response, on pooled data.

The integral over what is missing is a Gauss-Hermite rule with many nodes, all in numpy, so that complex steps
differentiate it.
"""

import numpy as np
from oracle import Pooled, Study, simulate
from scipy.optimize import minimize
from scipy.special import gammaln, log_ndtr
from statsmodels.tools.numdiff import approx_fprime_cs, approx_hess_cs

EPS, STEP = 1e-30, 1e-4
SCALE = 1
"""Place of the residual variance in the vector of parameters; it has no meaning here."""


def hessian_information(theta, glm, linear, columns):
    """Numerical Hessian of the log-likelihood times -1, by the chain rule.

    Integrals are differentiated in mean and variance of each entity's predictor, and these two in theta.
    """
    theta = np.asarray(theta)
    m, v = linear(theta)
    h = STEP * np.where(v > 0.0, v, 1.0)

    def slopes(m, v):
        parts = glm.log_response(m + 1j * EPS, v), glm.log_response(m, v + 1j * EPS)
        return np.array([part.imag / EPS for part in parts])

    by_m = (slopes(m + STEP, v) - slopes(m - STEP, v)) / (2.0 * STEP)
    by_v = (slopes(m, v + h) - slopes(m, v - h)) / (2.0 * h)
    first = slopes(m, v)
    J = [approx_fprime_cs(theta, lambda at, part=part: linear(at)[part]) for part in (0, 1)]

    def at_first(at):
        return np.sum(first * linear(at)) + columns(at).sum()

    cross = (J[0].T * by_m[1]) @ J[1]
    squares = (J[0].T * by_m[0]) @ J[0] + (J[1].T * by_v[1]) @ J[1]
    return -(squares + cross + cross.T + approx_hess_cs(theta, at_first))


class PooledGLM(Pooled):
    """As :class:`oracle.Pooled`; `link` is "Logit", "Probit" or "Log"."""

    def __init__(self, y, blocks, link, nodes=40):
        super().__init__(y, blocks)
        self.link = link
        self.x, w = np.polynomial.hermite_e.hermegauss(nodes)
        self.log_w = np.log(w / w.sum())

    def log_mass(self, y, eta):
        if self.link == "Logit":
            return y * eta - np.log1p(np.exp(eta))
        if self.link == "Probit":
            return log_ndtr(np.where(y > 0, eta, -eta))
        return y * eta - np.exp(eta) - gammaln(y + 1.0)

    def linear(self, theta):
        """Mean and variance of every linear predictor given what is seen."""
        theta = np.asarray(theta)
        beta0, _, betas, mus, Sigmas = self.unpack(theta)
        m, v = np.full(len(self.y), beta0), np.zeros(len(self.y), dtype=theta.dtype)
        for k, (b, mu, S) in enumerate(zip(betas, mus, Sigmas, strict=True)):
            has = self.seen[:, k]
            m[has] += self.blocks[k][has] @ b
            m[~has] += mu @ b
            v[~has] += b @ S @ b
        return m, v

    def log_response(self, m, v):
        """Log-likelihood of every response; an integral where columns are missing."""
        out, lacks = self.log_mass(self.y, m + 0.0 * v), ~self.seen.all(axis=1)
        eta = m[lacks, None] + np.sqrt(v[lacks])[:, None] * self.x
        terms = self.log_w + self.log_mass(self.y[lacks, None], eta)
        top = terms.real.max(axis=1)
        out[lacks] = top + np.log(np.exp(terms - top[:, None]).sum(axis=1))
        return out

    def loglike_obs(self, theta):
        m, v = self.linear(theta)
        return self.log_response(m, v) + self.columns(theta)

    def columns(self, theta):
        """Log-likelihood of the columns of every entity."""
        theta = np.asarray(theta)
        _, _, _, mus, Sigmas = self.unpack(theta)
        out = np.zeros(len(self.y), dtype=theta.dtype)
        for k, (mu, S) in enumerate(zip(mus, Sigmas, strict=True)):
            has = self.seen[:, k]
            U = self.blocks[k][has] - mu
            out[has] -= 0.5 * (
                np.log(2.0 * np.pi) * len(mu)
                + np.log(np.linalg.det(S))
                + np.sum(U.T * np.linalg.solve(S, U.T), axis=0)
            )
        return out

    def mean(self, theta):
        """E[y | what is seen], (n,)."""
        m, v = self.linear(theta)
        eta = m[:, None] + np.sqrt(v)[:, None] * self.x
        inverse = {
            "Logit": lambda e: 1.0 / (1.0 + np.exp(-e)),
            "Probit": lambda e: np.exp(log_ndtr(e)),
            "Log": np.exp,
        }[self.link]
        return inverse(eta) @ np.exp(self.log_w)

    def joint(self, theta):
        """Centered intercept, coefficients and means by client, and the variances of their predictors."""
        beta0, _, betas, mus, Sigmas = self.unpack(theta)
        a = beta0 + sum(b @ mu for b, mu in zip(betas, mus, strict=True))
        t = [b @ S @ b for b, S in zip(betas, Sigmas, strict=True)]
        pairs = [part for b, mu in zip(betas, mus, strict=True) for part in (b, mu)]
        return np.concatenate([[a], *pairs, t])

    @property
    def free(self):
        """Places of the parameters that there are."""
        d = len(self.start())
        return np.delete(np.arange(d), SCALE)

    def start(self):
        """No effects, and the moments of the seen rows."""
        rows = self.seen_rows()
        moments = [np.cov(X.T, bias=True).reshape(X.shape[1], -1) for X in rows]
        return self.pack(0.0, 1.0, [np.zeros(p) for p in self.sizes], [X.mean(axis=0) for X in rows], moments)

    def score_obs(self, theta):
        return approx_fprime_cs(theta, self.loglike)

    def information(self, theta):
        return hessian_information(theta, self, self.linear, self.columns)[np.ix_(self.free, self.free)]

    def covariance(self, theta):
        """Inverse information of all parameters; that of the residual variance is zero."""
        d = len(theta)
        out = np.zeros((d, d))
        out[np.ix_(self.free, self.free)] = np.linalg.inv(self.information(theta))
        return out

    def maximize(self):
        """Find the maximum from scratch, and polish it by Newton steps."""

        def loss(theta):
            *_, Sigmas = self.unpack(theta)
            if min(np.linalg.eigvalsh(S)[0] for S in Sigmas) <= 0.0:
                return np.inf
            return -self.loglike(theta)

        free, theta = self.free, self.start()
        theta = minimize(loss, theta, jac=lambda t: -self.score(t), method="BFGS", options={"gtol": 1e-4}).x
        for _ in range(3):
            theta[free] += np.linalg.solve(self.information(theta), self.score(theta)[free])
        return theta


def binary(study, seed=0, count=False):
    """The study with a response that is binary, or a count, given the old one's place in its distribution."""
    y = study.table["y"]
    place = ((y - y.mean()) / y.std()).to_numpy()
    rng = np.random.default_rng([seed, 9])
    new = rng.poisson(np.exp(0.5 * place)) if count else place + rng.logistic(size=len(y)) > 0.2
    return Study(study.table.assign(y=new.astype(float)), study.columns, study.holder)


def glm_study(seed=0, n=250, family="Binomial", **options):
    """Three sites with blocks missing at random, and a response of the family."""
    return binary(simulate(seed, n, **options), seed, count=family == "Poisson")


def glm_theta(model, result, study):
    """All parameters of a fit, as :class:`PooledGLM` packs them; Sigma from what the sites remember."""
    fit, pooled = (
        result._fit,
        PooledGLM(study.table["y"], [study.table[c] for c in study.columns.values()], "Logit"),
    )
    Sigmas = []
    for site in study.columns:
        kept = model.partition.sites[site].states[model._session].look_at("vfem")
        scale = kept.block.scale
        Sigmas.append(kept.accepted.Sigma * np.outer(scale, scale))
    return pooled.pack(
        fit.beta0, 1.0, [fit.beta[k] for k in study.columns], [fit.mu[k] for k in study.columns], Sigmas
    )
