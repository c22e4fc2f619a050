"""Dry run of a fit: what the fit reveals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.disclosure.state import State
from fedstat.federation.dry_run.execution import DryRunRecord, DrySite
from fedstat.federation.dry_run.expected_releases import ExpectedReleases, IterationLoop
from fedstat.federation.dry_run.synthetic import synthetic_generator
from fedstat.federation.protocols.product_steps import PRODUCT_STEPS
from fedstat.models.explain import DryRunPlan
from fedstat.models.m2sem.columns import COLUMNS_ITEM, OpenedCovariates, OpenedModalities, OpenedModality
from fedstat.models.m2sem.request import CovariatesReply, ModalityRequest
from fedstat.models.m2sem.specification import ColumnsSchema
from fedstat.models.m2sem.steps import ADJUSTED
from fedstat.models.m2sem.summary import adjusted_in_words
from fedstat.typing import Array, Ints

REHEARSED = 60
"""Rounds of a dry run; later ones are similar."""


class M2SEMPlan(DryRunPlan):
    """Properties of clusters over sites that are known before a fit or a search.

    The number of mixtures improved in parallel, and of scores that differ by cluster, depends on the data.
    """

    guessed = frozenset({"improve", "open_scores", *PRODUCT_STEPS})

    def __init__(self, model: Any, given: Mapping[str, Any]) -> None:
        super().__init__(model, given)
        self.model = model

    def arguments(self) -> Mapping[str, Any]:
        """Run only a few rounds, without local steps, which have no effect on releases."""
        rounds = min(int(self.given["maxiter"]), REHEARSED)
        return {"maxiter": rounds, "local_steps": 1}

    def loops(self, state: DryRunRecord) -> Sequence[IterationLoop]:
        """Continue until nothing changes."""
        return [IterationLoop(("improve",), int(self.given["maxiter"]))]

    def learned(self, expected: ExpectedReleases) -> Iterator[tuple[str, str]]:
        """State what posteriors and sums reveal."""
        yield from learned_of(self.model, self.given["starts"] == "all" and self.model.n_clusters > 1)
        if self.given.get("cov_type") is not None and self.model.n_clusters > 1:
            yield from products_reported(self.model._subjects.sites)

    def notes(self, expected: ExpectedReleases) -> Iterator[str]:
        """State what a round contains."""
        yield (
            "Several mixtures are improved in one round during the comparison of starts and penalties, "
            "each with its own differences of log densities."
        )


def learned_of(model: Any, own: bool) -> Iterator[tuple[str, str]]:
    """State who learns what."""
    sites, sums = model._subjects.sites, model._subjects.members.sum(axis=1)
    yield (
        "each site",
        "the probability of each cluster for each of its own entities, after every round. Clusters depend "
        "on the columns of all sites, so these probabilities reveal something about the other sites' "
        "columns: for an entity in a cluster of ill persons, that it is probably ill",
    )
    yield (
        "coordinator",
        "for every entity and round, the sum over sites of differences of its log densities between "
        "clusters. For continuous columns these are linear in the values. Over many rounds they span "
        + (
            "the joint factor scores of each entity (as many directions as factors of all modalities), and "
            "thereby the sums of the sites' columns along these directions"
            if model.n_factors
            else "sums of the sites' columns, as many directions as there are columns, because there are no "
            "factors"
        )
        + ". They do not reveal how unusual an entity is. A party that knows the columns of some sites can "
        "compute the other sites' part",
    )
    yield (
        "coordinator that deviates from the protocol",
        "sums along directions of its choice, if it invents posteriors, or parameters in a request for "
        "predictions. Sites accept only posteriors that all sites receive, and that leave the owner's "
        "minimum count of entities in every cluster. The sums have as many directions as sites have columns. "
        "As many numbers determine every row, up to one unknown combination of the columns that is the same "
        "for all rows. Sums of log densities and selected columns are not compared with one another: two of "
        "them, for posteriors that differ in one entity, reveal its contribution. A fit releases the "
        "estimates of one mixture. They are compared with those of the session, or of all fits if the owner "
        'stores them (remember = "all"), by the posteriors of their last EM steps. Releases of earlier steps '
        "are not compared with anything, and reveal information about an entity in which two fits differ "
        "there",
    )
    yield (
        "coordinator",
        "with the estimates, the mean of each column, or the share of each level, over the entities with "
        "each most likely cluster. A site leaves a column out as a whole if its rules on groups of rows do "
        "not allow a sum. "
        + (
            ""
            if model.n_factors
            else "Without factors, the estimates are such sums, weighted by posteriors, so the site refuses "
            "estimates if it does not allow those of a column that is not ordinal. "
        )
        + "For each continuous column, also whether its skewness exceeds 1",
    )
    alone = int((sums[model._subjects.pattern] == 1).sum())
    two = int((sums[model._subjects.pattern] == 2).sum())
    terms = {site: one.terms for site, one in model._chosen.adjust.items()}
    if terms:
        yield (
            "coordinator",
            f"{adjusted_in_words(terms, model._chosen.columns)}. The coordinator learns names and levels of "
            "covariates, how many records lack some, and which entities remain; with the estimates also "
            "means and deviations, the coding with the state of transforms, and effects on every column",
        )
    if len(sites) == 1:
        yield "coordinator", f"all sums are '{sites[0]}''s own parts: it is the only site"
    elif len(sites) == 2:
        yield (
            "each site",
            "the other's part, from a sum and its own part, if the coordinator passes sums on: with two "
            "sites, masks do not help",
        )
    if alone and len(sites) > 1:
        yield (
            "coordinator",
            f"for {alone:,} entities that only one site has, that site's own part of every sum: the others "
            "add zeros",
        )
    if two and len(sites) > 2:
        yield (
            "each site",
            f"for {two:,} entities that two sites have, the other's part, if the coordinator passes sums on",
        )
    if own:
        yield (
            "coordinator and all sites",
            "each site's clusters of its own entities by its own columns, from which some starts begin; "
            "starts='sum' leaves them out. A request for other numbers of clusters reveals more about "
            "which entities have similar factor scores; a repeated request reveals nothing new",
        )


def products_reported(sites: Sequence[str]) -> Iterator[tuple[str, str]]:
    """State what standard errors reveal."""
    yield (
        "coordinator",
        "for standard errors, the information of each site's parameters, and for every two sites sums, "
        "over all entities that both have, of products of their scores, by secure multiplication: no score "
        "of an entity. A party that knows all scores of one site has as many equations about each score of "
        "another site as the first site has scores; there are at least twice as many entities as scores. "
        "cov_type=None leaves them out",
    )
    if len(sites) == 2:
        yield (
            "coordinator",
            "the random numbers of these products, which it deals. Together with what one site sends to "
            "the other, they reveal that site's scores, so the dealer must not collude with either",
        )


def invent_sites(
    agreed: ColumnsSchema, rows: Mapping[str, Ints], policies: Mapping[str, Policy], session: str
) -> dict[str, DrySite]:
    """Give every site opened columns of the agreed kinds and levels, with simulated values."""
    rng, sites = synthetic_generator(), {}
    for name, policy in policies.items():
        site = DrySite(name, policy, len(rows[name]), entities=rows[name])
        sites[name] = site
        if name in agreed.modalities:
            state, seen = State(name), agreed.seen[name]
            drawn = [OpenedModality(one, _draw(one, int(seen.sum()), rng)) for one in agreed.modalities[name]]
            columns = sum(len(one.columns) for one in agreed.modalities[name])
            if name in agreed.covariates:
                state.reported.update(ADJUSTED)  # facts about rows that do not exist
            covariates = _draw_covariates(agreed.covariates.get(name), int(seen.sum()), rng)
            opened = OpenedModalities(tuple(drawn), seen, covariates)
            state.keep(COLUMNS_ITEM, opened, int(seen.sum()), columns=columns)
            site.open(session, state)
    return sites


def _draw_covariates(
    reported: CovariatesReply | None, n: int, rng: np.random.Generator
) -> OpenedCovariates | None:
    if reported is None:
        return None
    X = rng.integers(-2, 3, size=(n, len(reported.names))).astype(float)
    return OpenedCovariates(BlockSpec(names=reported.names), X, np.array([X.mean(axis=0), X.std(axis=0)]))


def _draw(one: ModalityRequest, n: int, rng: np.random.Generator) -> Array:
    if one.continuous:
        return np.asarray(rng.normal(size=(n, len(one.columns))))
    return np.column_stack([np.arange(n) % len(c.levels) for c in one.columns])[rng.permutation(n)]
