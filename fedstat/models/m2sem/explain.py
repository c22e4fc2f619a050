"""Dry run of a fit: what the fit discloses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.state import State
from fedstat.federation.dry_run.execution import DryRunRecord, DrySite
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.dry_run.synthetic_rows import synthetic_generator
from fedstat.models.explain import ForecastPlan
from fedstat.models.m2sem.columns import COLUMNS_ITEM, OpenedCovariates, OpenedModalities, OpenedModality
from fedstat.models.m2sem.request import CovariatesReply, ModalityRequest
from fedstat.models.m2sem.specification import AgreedColumns
from fedstat.models.m2sem.steps import ADJUSTED
from fedstat.models.m2sem.summary import adjusted_in_words
from fedstat.typing import Array, Ints

REHEARSED = 60
"""Rounds of a dry run; the others are like them."""


class M2SEMPlan(ForecastPlan):
    """What is known of clusters over sites before a fit or a search.

    How many mixtures are improved side by side, and how many scores differ by cluster, is up to the data.
    """

    guessed = frozenset({"improve", "open_scores", "open_product", "deal_product", "share_product"})

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self.model = model

    def arguments(self) -> Mapping[str, Any]:
        """Rehearse a few rounds only, without local steps that nobody sees."""
        rounds = min(int(self.given["max_rounds"]), REHEARSED)
        return {"max_rounds": rounds, "local_steps": 1}

    def loops(self, course: DryRunRecord) -> Sequence[IterationLoop]:
        """Go on until nothing changes any more."""
        return [IterationLoop(("improve",), int(self.given["max_rounds"]))]

    def learned(self, forecast: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """Say what posteriors and sums tell."""
        yield from learned_of(self.model, self.given["starts"] == "all" and self.model.n_clusters > 1)
        if self.given.get("cov_type") is not None and self.model.n_clusters > 1:
            yield from products_told(self.model._subjects.clients)

    def notes(self, forecast: ExpectedReleases) -> Iterator[str]:
        """Say what a round holds."""
        yield (
            "Several mixtures are improved in one round while starts and penalties are tried, each with its "
            "own differences of log densities."
        )


def learned_of(model: Any, own: bool) -> Iterator[tuple[str, str]]:
    """Say who learns what, in the words of whoever is asked."""
    clients, sums = model._subjects.clients, model._subjects.members.sum(axis=1)
    yield (
        "each site",
        "the probability of each cluster for each of its own entities, after every round. Clusters are made "
        "of all sites' columns, so this tells it something of what the others hold: of an entity in a "
        "cluster of the ill, that it is probably ill",
    )
    yield (
        "coordinator",
        "for every entity, the sum over sites of differences of its log densities between clusters, "
        "of every round. For continuous columns they are linear in the values: over many rounds they span "
        "the joint factor scores of each entity (as many directions as factors of all modalities), and with "
        "these the sums of what sites' columns say along them. They do not tell how odd an entity is. "
        "Whoever knows some sites' columns has the others' part",
    )
    yield (
        "coordinator that departs from a fit",
        "sums along directions of its choice, from posteriors that it makes up, or from parameters that are "
        "asked for predictions. Sites take posteriors only that all are told alike, and that leave "
        "the owner's minimum count of entities to every cluster. These sums have as many directions as "
        "sites have columns: with as many numbers, every row, up to one unknown combination of the "
        "columns that is the same for all. Sums of log densities and selected columns are not held against "
        "one another: two under posteriors that differ in one entity tell what it adds. Estimates leave of "
        "one mixture a fit, and are held against those of the session, or of all fits where the owner has "
        "them remembered "
        '(remember = "all"), by the posteriors of their last EM steps; what steps before these leave is not '
        "held against anything, and tells of an entity in which two fits differ there",
    )
    alone = int((sums[model._subjects.pattern] == 1).sum())
    two = int((sums[model._subjects.pattern] == 2).sum())
    terms = {client: one.terms for client, one in model._chosen.adjust.items()}
    if terms:
        yield (
            "coordinator",
            f"{adjusted_in_words(terms, model._chosen.columns)}. Of covariates it is told names "
            "and levels, how many records lack some, which entities are left; and with the estimates means "
            "and deviations, the coding with what transforms keep, and effects on every column",
        )
    if len(clients) == 1:
        yield "coordinator", f"all sums are '{clients[0]}''s own parts: it is the only site"
    elif len(clients) == 2:
        yield (
            "each site",
            "the other's part, from a sum and its own part, if the coordinator passes sums on: with two "
            "sites no masks help",
        )
    if alone and len(clients) > 1:
        yield (
            "coordinator",
            f"of {alone:,} entities that one site alone has, that site's own part of every "
            "sum: the others add zeros",
        )
    if two and len(clients) > 2:
        yield (
            "each site",
            f"of {two:,} entities that two sites have, the other's part, if the coordinator passes sums on",
        )
    if own:
        yield (
            "coordinator and all sites",
            "each site's clusters of its own entities by its own columns, from which some starts "
            "begin; starts='sum' leaves them out. Asked for other numbers of clusters, they tell more of "
            "which entities have like factor scores; asked for the same again, nothing new",
        )


def products_told(clients: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Say what standard errors tell."""
    yield (
        "coordinator",
        "for standard errors, the information of each site's parameters, and of every two "
        "sites sums over all entities that both have of products of their scores, by secure "
        "multiplication: no score of an entity. Whoever knows all scores of one site has as many "
        "equations about each score of another as that site has scores; there are twice as many "
        "entities as scores at least. cov_type=None leaves them out",
    )
    if len(clients) == 2:
        yield (
            "coordinator",
            "the random numbers of these products, which it deals: together with what one site shows "
            "the other they are that site's scores, so it must collude with neither",
        )


def invent_clients(
    agreed: AgreedColumns, rows: Mapping[str, Ints], policies: Mapping[str, Policy], session: str
) -> dict[str, DrySite]:
    """Let every site have opened columns of the agreed kinds and levels, with drawn values."""
    rng, sites = synthetic_generator(), {}
    for name, policy in policies.items():
        site = DrySite(name, policy, len(rows[name]), entities=rows[name])
        sites[name] = site
        if name in agreed.modalities:
            state, seen = State(name), agreed.seen[name]
            drawn = [OpenedModality(one, _draw(one, int(seen.sum()), rng)) for one in agreed.modalities[name]]
            columns = sum(len(one.columns) for one in agreed.modalities[name])
            if name in agreed.covariates:
                state.told.update(ADJUSTED)  # facts about rows that are not there
            covariates = _draw_covariates(agreed.covariates.get(name), int(seen.sum()), rng)
            opened = OpenedModalities(tuple(drawn), seen, covariates)
            state.keep(COLUMNS_ITEM, opened, int(seen.sum()), columns=columns)
            site.open(session, state)
    return sites


def _draw_covariates(
    told: CovariatesReply | None, n: int, rng: np.random.Generator
) -> OpenedCovariates | None:
    if told is None:
        return None
    X = rng.integers(-2, 3, size=(n, len(told.names))).astype(float)
    return OpenedCovariates(BlockSpec(names=told.names), X, np.array([X.mean(axis=0), X.std(axis=0)]))


def _draw(one: ModalityRequest, n: int, rng: np.random.Generator) -> Array:
    if one.continuous:
        return np.asarray(rng.normal(size=(n, len(one.columns))))
    return np.column_stack([np.arange(n) % len(c.levels) for c in one.columns])[rng.permutation(n)]
