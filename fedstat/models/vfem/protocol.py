"""Which rounds a fit by iteration takes: the maximum, fitted values, the covariance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from fedstat.federation.rounds.engine import Rounds
from fedstat.federation.rounds.masked_sums import masked
from fedstat.models.vfem.blocks.layout import Layout
from fedstat.models.vfem.blocks.request import ask
from fedstat.models.vfem.covariance.glm_protocol import glm_covariance
from fedstat.models.vfem.covariance.protocol import Covariance, information_covariance
from fedstat.models.vfem.covariance.sem_protocol import sem_covariance
from fedstat.models.vfem.iteration import glm_protocol, protocol
from fedstat.models.vfem.moments.cross_products import CrossOptions, check_dealers
from fedstat.typing import Array, Floats

Names: TypeAlias = Mapping[str, tuple[str, ...]]
Fitted: TypeAlias = Mapping[str, Array]


def fit_normal(
    ascent: protocol.Ascent,
    first_point: Rounds[Mapping[str, Floats] | None],
    cross: CrossOptions,
    cov_type: str,
    names: Names,
) -> Rounds[tuple[protocol.Fit, Covariance | None, Fitted]]:
    """Fit a normal response by iteration, and estimate the covariance that `cov_type` names."""
    layout = ascent.layout
    check_dealers(layout, cross)
    beta = yield from first_point
    fit = yield from protocol.maximise(ascent, beta)
    fitted = yield from ask_fitted(layout, "fitted", ascent.session, cross.at)
    covariance = None
    if cov_type == "sem":
        covariance = yield from sem_covariance(ascent, cross, fit.a, fit.s2)
    elif cov_type != "none":
        covariance = yield from information_covariance(ascent, cross, names, cov_type == "robust")
    return fit, covariance, fitted


def fit_glm(
    ascent: glm_protocol.GLMAscent, hidden: bool, cross: CrossOptions, cov_type: str, names: Names
) -> Rounds[tuple[glm_protocol.GLMFit, Covariance | None, Fitted]]:
    """Fit a response that is not normal, under masks where `hidden`, and estimate the covariance."""
    layout = ascent.layout
    climb = glm_protocol.maximise(ascent)
    fit = yield from masked(climb, layout.clients, ascent.session) if hidden else climb
    fitted = yield from ask_fitted(layout, "glm_fitted", ascent.session, cross.at)
    covariance = None
    if cov_type != "none":
        covariance = yield from glm_covariance(ascent, cross, names)
    return fit, covariance, fitted


def ask_fitted(layout: Layout, step: str, session: str, at: str | None) -> Rounds[Fitted]:
    """Ask for fitted values where the coordinator sits at the response holder; nothing elsewhere."""
    if at != layout.active:
        return {}
    (reply,) = yield [ask(layout.active, step, session)]
    return reply.arrays
