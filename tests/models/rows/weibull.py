"""Weibull regression over sites: the example of a likelihood over rows that a user writes.

``log T = x'b + sigma W``, with W of the smallest extreme value, as R's ``survreg``. Rows have two linear
predictors: x'b and the logarithm of sigma.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import numpy as np

from fedstat.codec import to_json
from fedstat.errors import EstimationError, MessageError
from fedstat.federation.design.horizontal_steps import OPEN_ROWS, rows_of, standardization
from fedstat.models.horizontal.model import HorizontalModel
from fedstat.models.horizontal.rows import summed
from fedstat.models.horizontal.session import add
from fedstat.models.rows.newton import LikelihoodNewton, open_rows
from fedstat.models.rows.objective import ClusterRequest, PredictorObjective
from fedstat.models.run import Call, run_fit
from fedstat.typing import Floats


class WeibullRows(PredictorObjective):
    """One fit's times, their logarithms, events and weights."""

    family = "weibull"
    starts: ClassVar = {"response": summed("sums of weights, events and times", behind=OPEN_ROWS)}

    @classmethod
    def begin(cls, data, state, request):
        """Check the times, and sum them."""
        opened = rows_of(state)
        if not opened.question.has_times:
            raise MessageError(f"{data.name}: the model opened no times")
        if any(rows.times[:, 0].any() for rows, _ in opened.chunks()):
            raise MessageError(f"{data.name}: late entry is not part of this model")
        site = cls(opened, request, state.entities)
        w, d, t = (np.concatenate(parts) for parts in zip(*site.times(), strict=True))
        return site, {"response": np.array([w.sum(), w @ d, w @ t])}

    def times(self) -> Iterator[tuple[Floats, Floats, Floats]]:
        """Yield weights, events and times."""
        for rows, _ in self.opened.chunks():
            yield np.ones(len(rows.y)) if rows.weight is None else rows.weight, rows.y, rows.times[:, 1]

    @property
    def matrices(self) -> Floats:
        """Coefficients of all columns, and the logarithm of sigma, which has the constant alone."""
        p = len(self.opened.scale)
        M = np.zeros((2, p, p + 1))
        M[0, :, :p], M[1, 0, p] = np.eye(p), 1.0
        return M

    def rows_at(self, own: Floats) -> Iterator[tuple[Floats, Floats, Floats, Floats]]:
        """Yield columns, log-densities or log-survival, and their derivatives by the two predictors."""
        for (rows, X), (w, d, t) in zip(self.opened.chunks(), self.times(), strict=True):
            eta, log_sigma = (X @ self.coefficients(own).T).T
            eta = eta if rows.offset is None else eta + rows.offset
            sigma = np.exp(log_sigma)
            z = (np.log(t) - eta) / sigma
            e = np.exp(z)
            g = w * np.array([(e - d) / sigma, z * (e - d) - d])
            cross = (e - d + z * e) / sigma
            H = -w * np.array([[e / sigma**2, cross], [cross, z * sigma * cross]])
            yield X, w * (d * (z - log_sigma - np.log(t)) - e), g.T, H.transpose(2, 0, 1)

    @property
    def first(self) -> Floats:
        """Start at exponential times."""
        w, d, t = (np.concatenate(parts) for parts in zip(*self.times(), strict=True))
        return exponential(np.array([w.sum(), w @ d, w @ t]), len(self.opened.scale))


def exponential(response: Floats, p: int) -> Floats:
    """Parameters with which all times have the same exponential distribution."""
    start = np.zeros(p + 1)
    start[0] = np.log(response[2] / response[1])
    return start


class WeibullNewton(LikelihoodNewton):
    """Newton's method from exponential times."""

    def run(self, cov_type="nonrobust"):
        """Open the rows, maximize, and request the products of scores."""
        design, started, alone, _ = yield from open_rows(self.session, to_json(self.request), local=True)
        shift, scale = standardization(design.mean, design.spread, design.intercept)
        gamma, n = exponential(add(started, "response"), len(shift)), int(design.n.sum())
        point = partial(self.point, shift, scale)
        total = yield from self.evaluate(point(gamma))
        stop = EstimationError("the likelihood has no maximum")
        gamma, total, _, converged = yield from self.ascend(
            point, gamma, total, n=n, at_infinity=lambda *_: stop, stuck="no step increases the likelihood"
        )
        meat, clusters = [cov_type != "nonrobust", False], None
        ended = yield from self.finish(point(gamma), meat, clusters, total.information)
        return design, gamma, total, ended, alone, converged

    @staticmethod
    def point(shift, scale, beta):
        """Name the arrays of parameters."""
        return {"shift": shift, "scale": scale, "beta": beta}


class FederatedWeibull(HorizontalModel):
    """Weibull regression of times over sites that hold different rows."""

    model_name = "Federated Weibull model"
    _times = True

    def fit(self, cov_type="nonrobust", masked=True):
        """Return the design, parameters, sums, last replies and own fits."""
        return run_fit(self, Call.of(self.fit, locals()), FederatedWeibull._estimate, cov_type, masked)

    def _estimate(self, attempt, cov_type, masked):
        session = self._open_session("weibull", masked)
        newton = WeibullNewton(session, ClusterRequest())
        return attempt.run(newton.run(cov_type), session.masked_sites)
