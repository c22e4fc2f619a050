"""A smaller model from the moments of a larger one, at no further message."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from fedstat.errors import FormulaError, ModelError
from fedstat.federation.design.by_columns import BlockDesign, Design
from fedstat.federation.design.formula.parse import ClientTerms, Formula, parse_formula
from fedstat.federation.design.formula.terms import Term, term_columns, term_text
from fedstat.federation.design.spec import read_terms
from fedstat.models.vertical.exchange.patterns import PatternExchange
from fedstat.models.vertical.layout import Layout
from fedstat.models.vertical.model import VerticalModel
from fedstat.models.vfem.blocks.layout import make_layout
from fedstat.models.vfem.covariance.from_moments import CovType, MomentsOptions, estimate_from_moments
from fedstat.models.vfem.iteration.fit import by_client
from fedstat.models.vfem.statements.corrections import check_correction, correct
from fedstat.models.vfem.statements.outcome import HeldInSession, VFEMOutcome, as_between


def refit(
    model: VerticalModel, outcome: VFEMOutcome, exchange: PatternExchange, text: str, cov_type: CovType | None
) -> tuple[VerticalModel, Layout, VFEMOutcome, HeldInSession]:
    """Fit the smaller model of the formula `text` from model, outcome and moments of a larger fit."""
    formula = keep_terms(model.design, read_formula(text, model.formula, model.partition.columns))
    smaller = copy.copy(model)
    smaller.formula = formula
    blocks = tuple(keep_columns(b, formula) for b in model.design.blocks if b.client in clients_of(formula))
    smaller.design = replace(model.design, formula=formula, blocks=blocks)
    # Who has an entity, and which entities take part, stays as it was in the larger fit.
    layout = make_layout(model.design, outcome.method, partly=outcome.method == "vfem")
    kept = [block for block in blocks if block.client in layout.clients]
    names = tuple(name for block in kept for name in block.names)
    layout = replace(
        layout,
        clients=tuple(block.client for block in kept),
        sizes=tuple(len(block.names) for block in kept),
        names=names,
        terms=tuple(term for block in kept for term in block.term_names),
        details=tuple(block.detail for block in kept),
        has={block.client: block.has for block in kept if block.has is not None and not block.whole.all()},
        frequencies="freq_weights" in model._roles,
    )
    moments = exchange.moments.submodel(list(names))
    asked = cov_type or cast(CovType, outcome.cov_type)
    check_correction(outcome.correction, asked, as_between(outcome) == "free")
    wanted = MomentsOptions(asked, as_between(outcome), outcome.options.maxiter)
    found, covariance = estimate_from_moments(moments, wanted)
    made = correct(found, covariance, outcome.correction)
    fit = by_client(made.reported, wanted.between)
    return (
        smaller,
        layout,
        replace(outcome, cov_type=asked, fit=fit, covariance=made.covariance, refitted=True),
        HeldInSession(exchange=replace(exchange, moments=moments), moments_fit=found),
    )


def read_formula(text: str, larger: Formula, columns: Mapping[str, Sequence[str]]) -> Formula:
    """Read the formula of a smaller model; ``.`` stands for the columns that the larger one reads."""
    read = {*larger.response_columns, *[name for terms in larger.clients for name in terms.columns]}
    of_fit = {k: [name for name in names if name in read] for k, names in columns.items()}
    try:
        return parse_formula(text, of_fit)
    except FormulaError:
        return parse_formula(text, columns)  # a column that is not in the fit is named below


def clients_of(formula: Formula) -> list[str]:
    """Institutions with terms."""
    return [terms.client for terms in formula.clients]


def keep_terms(design: Design, smaller: Formula) -> Formula:
    """Write the smaller formula with the terms of the larger one, in their order there, if it is within."""
    larger = design.formula
    if smaller.response != larger.response or not smaller.intercept:
        raise ModelError(
            f"refit: expected the response '{larger.response}' and an intercept, received '{smaller.text}'"
        )
    wanted = {terms.client: read_by_factors(terms) for terms in smaller.clients}
    clients = []
    for terms in larger.clients:
        there, asked = read_by_factors(terms), wanted.pop(terms.client, {})
        _refuse_unknown([term for factors, term in asked.items() if factors not in there], larger)
        kept = {factors: term for factors, term in there.items() if factors in asked}
        _check_coding(design, terms.client, there, kept)
        read = {name for term in kept.values() for name in term_columns(term)}
        if kept:
            texts = tuple(term_text(term) for term in kept.values())
            clients.append(ClientTerms(terms.client, texts, tuple(c for c in terms.columns if c in read)))
    _refuse_unknown([term for asked in wanted.values() for term in asked.values()], larger)
    return replace(smaller, clients=tuple(clients))


def read_by_factors(terms: ClientTerms) -> dict[frozenset[str], Term]:
    """Read the terms of an institution; the order of the factors of a product does not matter."""
    return {frozenset(f.text for f in term): term for term in read_terms(terms.terms, terms.columns)}


def _refuse_unknown(terms: list[Term], larger: Formula) -> None:
    if terms:
        texts = ", ".join(f"'{term_text(term)}'" for term in terms)
        listed = ", ".join(text for client in larger.clients for text in client.terms)
        raise ModelError(f"refit: no term {texts} in this fit; it has {listed}. Fit the formula anew")


def _check_coding(
    design: Design, client: str, there: Mapping[frozenset[str], Term], kept: Mapping[frozenset[str], Term]
) -> None:
    """Refuse to leave out a term on which the coding of the levels in a product depends."""
    block = next(b for b in design.blocks if b.client == client)
    levels = {term for name, term in zip(block.names, block.term_names, strict=True) if "[" in name}
    for factors, term in kept.items():
        gone = [term_text(there[other]) for other in there if other < factors and other not in kept]
        if gone and term_text(term) in levels:
            raise ModelError(
                f"refit: the coding of '{term_text(term)}' depends on {', '.join(gone)}; keep both, or fit "
                "the formula anew"
            )


def keep_columns(block: BlockDesign, formula: Formula) -> BlockDesign:
    """Keep the columns of the terms of a formula."""
    terms = next(c.terms for c in formula.clients if c.client == block.client)
    columns = zip(block.names, block.term_names, strict=True)
    kept = [(name, term) for name, term in columns if term in terms]
    has = None if block.has is None else block.has[:, [term in terms for term in block.term_names]]
    return replace(block, names=tuple(n for n, _ in kept), term_names=tuple(t for _, t in kept), has=has)
