"""The coding of columns and response of a fit, for the entities of a prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedstat.federation.design.by_columns import design_ask
from fedstat.federation.design.formula.parse import ClientTerms
from fedstat.federation.design.formula.tree import iter_transforms
from fedstat.federation.design.spec import BlockSpec, coded_columns, read_terms
from fedstat.federation.rounds.engine import Rounds
from fedstat.models.vertical.model import VerticalModel


@dataclass(frozen=True, slots=True)
class ResponseSource:
    """Where the response of a fit was: its holder, the left side of the formula, the columns it reads."""

    client: str
    text: str
    columns: tuple[str, ...]


def released_specs(model: VerticalModel, clients: tuple[str, ...]) -> dict[str, str]:
    """Ask the sites of a fit how they coded their columns; those that it left out are left out here too."""
    # A smaller model from the moments of a larger one has the session of that, and asks for nothing twice.
    unknown = [k for k in clients if k not in model._codings]

    def protocol() -> Rounds[dict[str, str]]:
        replies = yield [design_ask(k, "release_spec", model._session) for k in unknown]
        return {reply.site: reply.text for reply in replies}

    if unknown:
        model._codings.update(model.engine.run(protocol(), model._new_ledger()))
    terms = {part.client: part for part in model.formula.clients}
    return {k: keep_coded(model._codings[k], terms[k]) for k in clients}


def keep_coded(spec: str, terms: ClientTerms) -> str:
    """Keep the coding of some of the terms of an institution."""
    whole = BlockSpec.from_json(spec)
    if whole.terms == terms.terms:
        return spec
    parsed = read_terms(terms.terms, terms.columns)
    transforms = {t.text for term in parsed for factor in term for t in iter_transforms(factor.tree)}
    columns = [(n, t) for n, t in zip(whole.names, whole.term_names, strict=True) if t in terms.terms]
    kinds = {name: whole.kinds[name] for name in terms.columns}
    coded = coded_columns(parsed, kinds)
    return replace(
        whole,
        terms=terms.terms,
        columns=terms.columns,
        names=tuple(name for name, _ in columns),
        term_names=tuple(term for _, term in columns),
        kinds=kinds,
        levels={name: whole.levels[name] for name in coded},
        state={text: state for text, state in whole.state.items() if text in transforms},
        means={name: mean for name, mean in whole.means.items() if name in terms.columns},
    ).to_json()
