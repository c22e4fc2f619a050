"""Printed summary of a fitted mixture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedstat.errors import Remedy
from fedstat.inference.mixtures import OVERLAP
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.summary import WIDTH, blank_repeats, header_sheet
from fedstat.inference.tables import Sheet, number
from fedstat.models.m2sem.record import M2SEMRecord
from fedstat.models.m2sem.tables import diverged_columns, has_errors, profile_errors, wald_tests

COARSE = 0.01
"""Smallest change of a posterior due to fewer nodes that the summary reports."""
LITTLE = 0.5
"""Entropy below which intervals are known to be too short."""
FAR = 0.25
"""Smallest difference of members' means from the model's that the summary reports, in deviations."""
SHOWN = 6
MOST_COLUMNS, MOST_CLUSTERS = 20, 4
"""Largest number of profiles that are printed."""
SKEWED = (
    "Skewed columns: {columns}. A mixture of normal distributions needs several clusters to fit one skewed "
    "column, so clusters may describe its shape and not groups (Bauer and Curran 2003). Take logarithms or "
    "ranks of these columns at their site, and search again."
)
BOOTSTRAP = Remedy("bootstrap()")
NOTES = Catalogue(
    critical={
        "overlap/strong": (
            "CLUSTERS OVERLAP STRONGLY (entropy {entropy:.2f}): intervals from the information are too "
            "short. In simulations intervals of level .95 covered the truth in .78 of cases. Use {remedy}, "
            "fewer clusters or more columns.",
            BOOTSTRAP,
        ),
        "not_converged": "NOT CONVERGED: after {rounds:,} rounds the log-likelihood still increases, or "
        "posteriors still change. Increase maxiter, or take fewer clusters or factors.",
    },
    warning={
        "overlap": (
            "Clusters overlap (entropy {entropy:.2f}): labels of many entities are uncertain, and standard "
            "errors may be too small. Use posteriors, and compare with {remedy}.",
            BOOTSTRAP,
        ),
        "diverging_loading": "The loading of {columns} diverges: the factors of the modality determine its "
        "level, so the likelihood has no maximum, and its standard errors and tests are withheld. Leave the "
        "column out, merge its levels, or take fewer factors.",
        "diverging_loading/classes": "In some cluster, a level of {columns} has the share 0 or 1, at the "
        "bound of the parameters, so its errors and tests are withheld. Merge levels, or take fewer "
        "clusters.",
        "no_clusters": "No modality separates the clusters: all means were selected to be the same. This "
        "criterion finds no evidence of clusters.",
        "emptied": "A cluster was emptied at {sites}, and restarted as half of the largest one. There may "
        "be fewer clusters.",
        "variance_floor": "The error variance of {columns} is at its lower bound: {determined} it, so the "
        "likelihood has no maximum. Leave a column out, or take fewer {fewer}",
        "coarse": "Posteriors differ by up to {largest:.2f} between the nodes of the search and those of "
        "the final fit: the comparison of supports is approximate.",
        "mean_residual": "The model does not fit the means of cluster {cluster}: for '{column}' at '{site}' "
        "its mean is {model}, that of its members {members} ({deviations:.2f} standard deviations). "
        "Describe clusters by members(), or take more factors.",
        "skewed": SKEWED,
    },
    info={
        "selection": "Results on columns and modalities are conditional on the selected support: "
        "probabilities and criteria do not account for the selection.",
        "distance": "Distance: how far apart clusters are in a modality, in standard deviations of {unit}; "
        "0 if it does not separate them.",
        "latent_classes": "Latent class analysis: columns are independent within clusters. If they are not, "
        "several clusters may describe one group; compare BIC with n_factors=1 by search().",
        "adjusted": "{words}: means and shares are at the means of the covariates; see covariate_effects() "
        "for their effects.{lacking}",
        "no_errors": "No standard errors: {problem}.",
        "errors": "Standard errors are from the observed information of all sites together (Louis "
        "1982){more}. chi2 and P are of the Wald test that all clusters are the same in a column. Members: "
        "the mean or share of entities whose most likely cluster this is.",
        "missing_blocks": "{share:.0%} of pairs of an entity and a site have no record. Such entities are "
        "clustered by their observed values, which is valid if missingness does not depend on unobserved "
        "values.",
    },
    protocol={
        "disclosed": "For every entity and round, the coordinator received sums over sites of differences "
        "of log densities, {masked}. They span {spanned}. Each site received the cluster probabilities of "
        "its own entities, which reveal something about the columns of other sites.",
        "own_clusters": "Clusters of each site's own columns were revealed, from which some starts began.",
    },
)


def summary_sheets(r: M2SEMRecord) -> Iterator[Sheet]:
    """Lay out header, clusters, modalities and sites."""
    lines = [
        ("Clusters", f"{len(r.shares)}, {factors_in_words(r.factors)}"),
        ("Entities", f"{r.n:,}"),
        ("Log-likelihood", f"{r.loglik:,.2f}"),
        ("Parameters", f"{r.parameters:,}"),
        ("BIC", f"{r.bic:,.1f}"),
        ("ICL", f"{r.bic + 2.0 * r.uncertainty:,.1f}"),
        ("Entropy", f"{r.entropy:.3f}"),
        ("Selection", "none" if r.select is None else f"{r.select.upper()} of refits"),
        ("Sites", str(len(r.sites))),
        ("Exchange", "masked sums" if r.masked else "clear"),
        ("Converged", "yes" if r.converged else "NO"),
        ("Starts with these clusters", "{} of {}".format(*r.starts)),
        ("Mean residual", "" if np.isnan(r.mean_residual) else f"{r.mean_residual:.3f} sd"),
    ]
    yield header_sheet("Clusters over sites", lines)
    yield from (_clusters(r), _modalities(r), *_profiles(r), _sites(r))


def factors_in_words(factors: int) -> str:
    """State the number of factors, or that clusters are latent classes."""
    return f"{factors} factor{'s' * (factors > 1)} a modality" if factors else "latent classes"


def _clusters(r: M2SEMRecord) -> Sheet:
    sizes, means = r.sizes, np.diag(r.classified).tolist()
    rows = tuple(
        (f"{k:d}", f"{share:.3f}", f"{entities:,}", f"{right:.3f}")
        for k, (share, entities, right) in enumerate(
            zip(sizes["share"], sizes["entities"], means, strict=True), 1
        )
    )
    headers = ("cluster", "share", "most likely of", "their mean posterior")
    return Sheet(headers, rows, "lrrr", (18, 10, 18, 24), gap=2)


def _modalities(r: M2SEMRecord) -> Sheet:
    frame = r.modalities
    sites = [str(site) for site, _ in frame.index]
    rows = tuple(
        (
            site,
            str(name),
            str(row["kind"]),
            f"{row['loaded']} of {row['columns']}",
            number(float(row["distance"]), 3) if row["selected"] else "0",
            *([f"{row['frequency']:.2f}"] if "frequency" in frame else []),
        )
        for site, (_, name), row in zip(
            blank_repeats(sites), frame.index, frame.to_dict("records"), strict=True
        )
    )
    often = "frequency" in frame
    headers = ("site", "modality", "kind", "columns", "distance", *(["selected in"] if often else []))
    widths = (16, 18 if often else 24, 18, 10, 10, *([11] if often else []))
    return Sheet(headers, rows, "lllrr" + "r" * often, widths, gap=1, wrap=True)


def _profiles(r: M2SEMRecord) -> Iterator[Sheet]:
    """Lay out profiles with standard errors, of the columns that differ most between clusters."""
    if not has_errors(r) or len(r.shares) > MOST_CLUSTERS:
        return
    frame, errors, tests = r.profiles(), profile_errors(r), wald_tests(r)
    shown = tests["statistic"].dropna().nlargest(MOST_COLUMNS).index
    found = dict(zip(tests.index.tolist(), tests.to_dict("records"), strict=True))
    members = r.members()
    here = [at for at, key in enumerate(frame.index) if key[:3] in shown]
    if not here:
        return
    rows: list[tuple[str, ...]] = []
    for at in here:
        site, modality, column, level = map(str, frame.index[at])
        test = found[site, modality, column]
        rows.append(
            (
                " = ".join(part for part in (column, level) if part),
                *(
                    f"{number(value, 3)} ({number(error, 3)})"
                    for value, error in zip(frame.iloc[at], errors[at], strict=True)
                ),
                f"{test['statistic']:.1f} ({test['df']:.0f})",
                f"{test['p_value']:.3f}",
            )
        )
        own = members.iloc[at].to_numpy(dtype=float)
        if not np.isnan(own).any():
            rows.append(("  members", *(f"{number(value, 3)}{' ' * 8}" for value in own), "", ""))
    headers = ("mean or share (std err)", *(f"cluster {k}" for k in r.clusters), "chi2 (df)", "P>chi2")
    widths = (24, *(18 for _ in r.shares), 11, 7)
    yield Sheet(headers, tuple(rows), "l" + "r" * (len(widths) - 1), widths, gap=1)


def _sites(r: M2SEMRecord) -> Sheet:
    rows = tuple(
        (site, str(sum(len(one.columns) for one in held.modalities)), f"{held.entities:,}")
        for site, held in r.sites.items()
    )
    return Sheet(("site", "columns", "entities"), rows, "lrr", (WIDTH - 22, 8, 10), gap=2)


def notes(r: M2SEMRecord) -> Iterator[Note]:
    """Write the notes of the fit."""
    if not r.converged:
        yield NOTES.note("not_converged", rounds=r.rounds)
    if r.select is not None:
        yield NOTES.note("selection")
        if not r.modalities["selected"].any():
            yield NOTES.note("no_clusters")
    yield NOTES.note(
        "distance",
        unit="the factors as measured by its columns" if r.factors else "its columns within clusters",
    )
    if not r.factors:
        yield NOTES.note("latent_classes")
    if r.adjusted:
        words = adjusted_in_words(r.adjusted, r.sites)
        lacking = [f"{held.without:,} at '{c}'" for c, held in r.sites.items() if held.without]
        yield NOTES.note(
            "adjusted",
            words=words[0].upper() + words[1:],
            lacking=f" Entities without a covariate count as missing: {', '.join(lacking)}."
            if lacking
            else "",
        )
    if r.observed is not None and not r.observed.available:
        yield NOTES.note("no_errors", problem=r.observed.problem)
    if has_errors(r):
        dropped = len(r.features) - MOST_COLUMNS
        more = "; the others are in tidy() and tests()" if dropped > 0 else ""
        yield NOTES.note("errors", more=more)
        yield from _diverged(r)
    if r.entropy < OVERLAP and len(r.shares) > 1:
        yield NOTES.note("overlap/strong" if r.entropy < LITTLE else "overlap", entropy=r.entropy)
    yield from misfits(r)
    if r.emptied:
        yield NOTES.note("emptied", sites=", ".join(map(repr, dict.fromkeys(r.emptied))))
    if floors := _listed([(site, name) for site, held in r.sites.items() for name in held.floor]):
        yield NOTES.note(
            "variance_floor",
            columns=floors,
            determined="other columns of the modality determine" if r.factors else "clusters determine",
            fewer="factors." if r.factors else "clusters.",
        )
    if r.coarse > COARSE:
        yield NOTES.note("coarse", largest=r.coarse)
    yield from disclosed(r)


def _diverged(r: M2SEMRecord) -> Iterator[Note]:
    """Name columns of levels whose loadings grow without limit."""
    if columns := _listed(diverged_columns(r)):
        yield NOTES.note("diverging_loading" if r.factors else "diverging_loading/classes", columns=columns)


def _listed(columns: Sequence[tuple[str, str]]) -> str:
    """Name columns, as (site, name), in a sentence."""
    more = f" and {len(columns) - SHOWN} more" if len(columns) > SHOWN else ""
    return ", ".join(f"'{name}' at '{site}'" for site, name in columns[:SHOWN]) + more


def misfits(r: M2SEMRecord) -> Iterator[Note]:
    """State where members' means differ from the model's, and which columns are skewed."""
    away = r.mean_residuals().dropna().abs()
    largest = float(away.to_numpy().max(initial=0.0))
    # Errors of classification and covariates also move members' means.
    if r.entropy >= OVERLAP and not r.adjusted and largest > FAR:
        row, k = np.unravel_index(int(away.to_numpy().argmax()), away.shape)
        site, modality, column, level = away.index.to_list()[row]
        at = r.profiles().index.to_list().index((site, modality, column, level))
        model, own = (float(frame.to_numpy()[at, k]) for frame in (r.profiles(), r.members()))
        yield NOTES.note(
            "mean_residual",
            cluster=k + 1,
            column=column,
            site=site,
            model=number(model, 3),
            members=number(own, 3),
            deviations=largest,
        )
    skewed = [f"'{name}' at '{site}'" for site, held in r.sites.items() for name in held.skewed]
    if skewed and len(r.shares) > 1:
        yield NOTES.note("skewed", columns=listed(skewed))


def listed(columns: list[str]) -> str:
    """List the first of several columns, as "'x' at 'A'"."""
    more = f" and {len(columns) - SHOWN} more" if len(columns) > SHOWN else ""
    return f"{', '.join(columns[:SHOWN])}{more}"


def adjusted_in_words(terms: Mapping[str, tuple[str, ...]], sites: Mapping[str, object]) -> str:
    """State which columns are adjusted for which covariates, and which are not."""
    each = ", ".join(f"of '{site}' for {' + '.join(own)}" for site, own in terms.items())
    left = ", ".join(repr(site) for site in sites if site not in terms)
    return f"columns {each} are adjusted" + (f", those of {left} are not" if left else "")


def disclosed(r: M2SEMRecord) -> Iterator[Note]:
    """State what the exchange revealed to whom."""
    few = len(r.sites) < 3
    masked = (
        "under masks, so that each part is hidden if three or more sites have an entity"
        if r.masked and not few
        else "which, with two sites, reveal each part to the other"
        if r.masked
        else "as each site's own part, unmasked"
    )
    yield NOTES.note(
        "disclosed", masked=masked, spanned="joint factor scores" if r.factors else "sums of columns"
    )
    if r.own:
        yield NOTES.note("own_clusters")
    count = int(np.sum([held.entities for held in r.sites.values()]))
    if count < r.n * len(r.sites):
        share = 1.0 - count / (r.n * len(r.sites))
        yield NOTES.note("missing_blocks", share=share)
