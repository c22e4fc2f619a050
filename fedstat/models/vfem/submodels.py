"""Smaller models from the moments of a larger fit: refits, and fits without each column."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.errors import EstimationError, FormulaError, ModelError
from fedstat.federation.design.coding import read_terms
from fedstat.federation.design.formula.parse import Formula, SiteTerms, parse_formula
from fedstat.federation.design.formula.terms import Term, term_columns, term_text
from fedstat.federation.design.vertical_design import BlockDesign, Design
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.joint_normal.assumption_tests import name_undetermined
from fedstat.models.vertical.joint_normal.fit import JointNormalFit, without_effects
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.base_model import make_layout
from fedstat.models.vfem.corrections import apply_correction, check_correction
from fedstat.models.vfem.covariance.from_moments import CovType, MomentsOptions, estimate_from_moments
from fedstat.models.vfem.iteration.state import fit_by_site
from fedstat.models.vfem.outcome import SessionArtifacts, VFEMOutcome, as_between
from fedstat.typing import Floats

# ----------------------------------------------------------------------------------------------------
# A smaller model from the moments of a larger one, without a message.


def refit(
    model: VerticalModel, outcome: VFEMOutcome, exchange: PatternExchange, text: str, cov_type: CovType | None
) -> tuple[VerticalModel, Layout, VFEMOutcome, SessionArtifacts]:
    """Fit the formula `text` from the model, outcome and moments of a larger fit."""
    formula = keep_terms(model.design, read_formula(text, model.formula, model.partition.columns))
    smaller = copy.copy(model)
    smaller.formula = formula
    blocks = tuple(keep_columns(b, formula) for b in model.design.blocks if b.site in sites_of(formula))
    smaller.design = replace(model.design, formula=formula, blocks=blocks)
    # The entities that take part, and the sites that have them, stay as in the larger fit.
    layout = make_layout(model.design, outcome.method, partly=outcome.method == "vfem")
    kept = [block for block in blocks if block.site in layout.sites]
    names = tuple(name for block in kept for name in block.names)
    layout = replace(
        layout,
        sites=tuple(block.site for block in kept),
        sizes=tuple(len(block.names) for block in kept),
        names=names,
        terms=tuple(term for block in kept for term in block.term_names),
        details=tuple(block.detail for block in kept),
        has={block.site: block.has for block in kept if block.has is not None and not block.complete.all()},
        frequencies="freq_weights" in model._roles,
    )
    moments = exchange.moments.submodel(list(names))
    request = cov_type or cast(CovType, outcome.cov_type)
    between = as_between(outcome)
    check_correction(outcome.correction, request, outcome.method, between)
    # Both fits have the same model of the columns, so that their likelihoods compare.
    wanted = MomentsOptions(request, between, outcome.options.maxiter, outcome.correction is not None)
    groups = exchange.by_group and exchange.by_group.submodel(list(names), by_group=True)
    estimate = estimate_from_moments(moments, wanted, groups)
    made = apply_correction(estimate.found, estimate.covariance, outcome.correction)
    fit, unchecked = fit_by_site(made.reported, between), name_undetermined(moments)
    choice = replace(outcome.choice, unchecked=unchecked) if outcome.choice and unchecked else None
    return (
        smaller,
        layout,
        replace(outcome, cov_type=request, fit=fit, covariance=made.covariance, refitted=True, choice=choice),
        SessionArtifacts(
            exchange=replace(exchange, moments=moments, by_group=groups), moments_fit=estimate.found
        ),
    )


def read_formula(text: str, larger: Formula, columns: Mapping[str, Sequence[str]]) -> Formula:
    """Parse the formula of a smaller model; ``.`` represents the columns of the larger one."""
    read = {*larger.response_columns, *[name for terms in larger.sites for name in terms.columns]}
    of_fit = {k: [name for name in names if name in read] for k, names in columns.items()}
    try:
        return parse_formula(text, of_fit)
    except FormulaError:
        return parse_formula(text, columns)  # a column that is not in the fit is named below


def sites_of(formula: Formula) -> list[str]:
    """Return the sites with terms."""
    return [terms.site for terms in formula.sites]


def keep_terms(design: Design, smaller: Formula) -> Formula:
    """Write the smaller formula with the terms of the larger one, in their order, if it is nested."""
    larger = design.formula
    if smaller.response != larger.response or not smaller.intercept:
        raise ModelError(
            f"refit: expected the response '{larger.response}' and an intercept, received '{smaller.text}'"
        )
    wanted = {terms.site: read_by_factors(terms) for terms in smaller.sites}
    sites = []
    for terms in larger.sites:
        there, request = read_by_factors(terms), wanted.pop(terms.site, {})
        _refuse_unknown([term for factors, term in request.items() if factors not in there], larger)
        kept = {factors: term for factors, term in there.items() if factors in request}
        _check_coding(design, terms.site, there, kept)
        read = {name for term in kept.values() for name in term_columns(term)}
        if kept:
            texts = tuple(term_text(term) for term in kept.values())
            sites.append(SiteTerms(terms.site, texts, tuple(c for c in terms.columns if c in read)))
    _refuse_unknown([term for request in wanted.values() for term in request.values()], larger)
    return replace(smaller, sites=tuple(sites))


def read_by_factors(terms: SiteTerms) -> dict[frozenset[str], Term]:
    """Read the terms of a site; the order of the factors of a product does not matter."""
    return {frozenset(f.text for f in term): term for term in read_terms(terms.terms, terms.columns)}


def _refuse_unknown(terms: list[Term], larger: Formula) -> None:
    if terms:
        texts = ", ".join(f"'{term_text(term)}'" for term in terms)
        listed = ", ".join(text for site in larger.sites for text in site.terms)
        raise ModelError(
            f"refit: no term {texts} in this fit; it has {listed}. Make a new fit of the formula"
        )


def _check_coding(
    design: Design, site: str, there: Mapping[frozenset[str], Term], kept: Mapping[frozenset[str], Term]
) -> None:
    """Refuse to leave out a term on which the coding of the levels in a product depends."""
    block = next(b for b in design.blocks if b.site == site)
    levels = {term for name, term in zip(block.names, block.term_names, strict=True) if "[" in name}
    for factors, term in kept.items():
        gone = [term_text(there[other]) for other in there if other < factors and other not in kept]
        if gone and term_text(term) in levels:
            raise ModelError(
                f"refit: the coding of '{term_text(term)}' depends on {', '.join(gone)}; keep both, or make "
                "a new fit of the formula"
            )


def keep_columns(block: BlockDesign, formula: Formula) -> BlockDesign:
    """Keep the columns of the terms of a formula."""
    terms = next(c.terms for c in formula.sites if c.site == block.site)
    columns = zip(block.names, block.term_names, strict=True)
    kept = [(name, term) for name, term in columns if term in terms]
    has = None if block.has is None else block.has[:, [term in terms for term in block.term_names]]
    return replace(block, names=tuple(n for n, _ in kept), term_names=tuple(t for _, t in kept), has=has)


# ----------------------------------------------------------------------------------------------------
# Fits without each column in turn, from moments, without a message.


@dataclass(frozen=True, slots=True, eq=False)
class LeaveOneColumnOut:
    """Fits without each of the P columns.

    The statistic (P,) is the likelihood ratio of the full fit against the fit without the column, with one
    degree of freedom; `params` (P, 1 + P) are intercept and coefficients without it, nan at its own place.
    """

    names: tuple[str, ...]
    sites: tuple[str, ...]
    log_likelihood: Floats
    rsquared: Floats
    statistic: Floats
    pvalue: Floats
    params: Floats

    def to_frame(self) -> pd.DataFrame:
        """One row per column that is left out."""
        return pd.DataFrame(
            {
                "site": self.sites,
                "statistic": self.statistic,
                "pvalue": self.pvalue,
                "llf": self.log_likelihood,
                "rsquared": self.rsquared,
            },
            index=pd.Index(self.names, name="left out"),
        )


def leave_one_out(fit: JointNormalFit) -> LeaveOneColumnOut:
    """Fit without each column in turn.

    The column stays in the joint normal model of the columns, without a coefficient. If columns are
    correlated between sites, it predicts missing columns. The row is nan if the likelihood has no maximum
    without the coefficient.

    Raises ModelError if there is only one column.
    """
    moments, P = fit.moments, len(fit.moments.names)
    if P < 2:
        raise ModelError("leave_one_out: the fit has only one column; without it no block remains")
    params = np.full((P, 1 + P), np.nan)
    llf, rsquared = np.full(P, np.nan), np.full(P, np.nan)
    for j in range(P):
        keep = np.arange(P) != j
        try:
            restricted = without_effects(fit, keep)
        except EstimationError:
            continue
        params[j, np.append(True, keep)] = restricted.params[np.append(True, keep)]
        llf[j], rsquared[j] = restricted.log_likelihood, restricted.rsquared
    statistic = 2.0 * (fit.log_likelihood - llf)
    return LeaveOneColumnOut(
        moments.names,
        tuple(moments.sites[k] for k in moments.owner),
        llf,
        rsquared,
        statistic,
        stats.chi2.sf(statistic, 1),
        params,
    )
