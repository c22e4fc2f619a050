"""Coverage of intervals with few clusters: ``python tests/benchmarks/bench_clusters.py [RUNS [DESIGN ...]]``.

A design is a name with any number of clusters, or one of them, as in "GLM, binary/20".

Clusters have unequal sizes and an effect of their own. The column x is constant within clusters, z varies
within them; neither has an effect. A federated fit is that of the pooled rows
(``tests/models/horizontal/test_clusters.py``), so estimates and covariances are computed from the pooled rows
by the same kernels, without messages. For Cox's model the rows of two sites have their own baseline hazards.
Rows are written to ``results/clusters.csv`` as they are done, and replace those of earlier runs.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fedstat.kernels.categories import CategoryRows, coefficient_map
from fedstat.kernels.clusters import Margins, cluster_products, cluster_sums, corrected_sums, pair_sums
from fedstat.kernels.partial_likelihood import PartialLikelihood, RiskTable
from fedstat.models.gee.steps import correlation
from fedstat.models.horizontal.clusters import FEW, POWERS, Clustering

RESULTS = Path(__file__).parent / "results" / "clusters.csv"
CLUSTERS = (8, 12, 20, 40)
STEPS = 60


@dataclass(frozen=True)
class Solution:
    """Estimate, places of x and z in it, and each cluster's score and information."""

    beta: Any
    places: tuple[list[int], list[int]]
    score: Any
    information: Any
    margins: Margins | None = None


@dataclass(frozen=True)
class Design:
    """A model, the least and the largest number of rows of a cluster, and the spread of slopes of z."""

    solve: Callable[[pd.DataFrame], Solution]
    sizes: tuple[int, int] = (2, 40)
    slopes: float = 0.0


def columns(table):
    """Design with a constant, cluster of each row, and their number."""
    code = table["cluster"].to_numpy()
    return np.column_stack([np.ones(len(table)), table[["x", "z"]]]), code, int(code.max()) + 1


def by_cluster(scores, code, count):
    """Sum rows by cluster."""
    return np.array([np.bincount(code, column, count) for column in scores.T]).T


def linear(table):
    """Least squares."""
    X, code, G = columns(table)
    y = table["y"].to_numpy()
    beta = np.linalg.lstsq(X, y, rcond=None)[0]
    score = by_cluster(X * (y - X @ beta)[:, None], code, G)
    return Solution(beta, ([1], [2]), score, cluster_products(X, np.ones(len(y)), code, G))


def logistic(table):
    """Logistic regression."""
    X, code, G = columns(table)
    y, beta = table["b"].to_numpy(), np.zeros(3)
    for _ in range(STEPS):
        mu = 1.0 / (1.0 + np.exp(-X @ beta))
        step = np.linalg.solve(X.T @ (X * (mu * (1.0 - mu))[:, None]), X.T @ (y - mu))
        beta = beta + step
        if np.abs(step).max() < 1e-9:
            break
    mu = 1.0 / (1.0 + np.exp(-X @ beta))
    score = by_cluster(X * (y - mu)[:, None], code, G)
    return Solution(beta, ([1], [2]), score, cluster_products(X, mu * (1.0 - mu), code, G))


def equations(binary):
    """Estimating equations with an exchangeable working correlation."""

    def solve(table):
        X, code, G = columns(table)
        y, beta, rho = table["b" if binary else "y"].to_numpy(), np.zeros(3), 0.0
        w, start = np.ones(len(y)), np.concatenate([[0], np.bincount(code).cumsum()])
        size = np.diff(start)
        pairs = float((size * (size - 1.0)).sum()) / 2.0
        counts = np.array([float(G), float(len(y)), pairs, pairs])
        for _ in range(STEPS):
            mu = 1.0 / (1.0 + np.exp(-X @ beta)) if binary else X @ beta
            root = np.sqrt(mu * (1.0 - mu)) if binary else w
            D, r = np.ascontiguousarray((X * root[:, None] if binary else X).T), (y - mu) / root
            score, parts = cluster_sums(D, r, w, start, 1, rho, True)
            step = np.linalg.solve(parts.sum(axis=0), score.sum(axis=0))
            totals = np.array([float(len(y)), r @ r])
            low = -0.99 / max(int(size.max()) - 1, 1)
            found = max(correlation("exchangeable", pair_sums(r, w, start), counts, totals, 3), low)
            if np.abs(step).max() < 1e-8 and abs(found - rho) < 1e-8:
                break
            beta, rho = beta + step, found
        return Solution(beta, ([1], [2]), score, parts)

    return solve


def categories(link):
    """Regression of categories."""

    def solve(table):
        X, code, G = columns(table)
        rows = CategoryRows(X, table["o"].to_numpy(dtype=np.int64), link)
        M = coefficient_map(3, 3, link != "baseline")
        beta = np.zeros(M.shape[1])
        if link != "baseline":
            beta[:2] = -1.0, 1.0
        for _ in range(STEPS):
            sums = rows.sums((M @ beta).reshape(2, 3))
            information = M.T @ sums.information.reshape(6, 6) @ M
            step = np.linalg.solve(information, M.T @ sums.score.ravel())
            beta = beta + step / max(1.0, np.abs(step).max())
            if np.abs(step).max() < 1e-9:
                break
        B = (M @ beta).reshape(2, 3)
        score = by_cluster(rows.row_scores(B) @ M, code, G)
        places = ([2], [3]) if link != "baseline" else ([1, 4], [2, 5])
        return Solution(beta, places, score, M.T @ rows.cluster_information(B, code, G) @ M)

    return solve


def survival(table):
    """Cox's model: half of the clusters at each of two sites with baseline hazards of their own."""
    parts = []
    for site in (0, 1):
        own = table[table["cluster"] % 2 == site]
        event = own["event"].to_numpy() == 1
        at_risk = RiskTable.of(np.zeros(len(own)), own["time"].to_numpy(), event)
        parts.append((at_risk, np.ascontiguousarray(own[["x", "z"]]), pd.factorize(own["cluster"])[0]))
    beta = np.zeros(2)
    for _ in range(STEPS):
        found = [PartialLikelihood.at(rows, X, X @ beta, "efron") for rows, X, _ in parts]
        information = sum(one.information() for one in found)
        step = np.linalg.solve(information, sum(one.score() for one in found))
        beta = beta + step / max(1.0, np.abs(step).max())
        if np.abs(step).max() < 1e-9:
            break
    scores, informations, margins = [], [], []
    for one, (rows, _, code) in zip(found, parts, strict=True):
        G = int(code.max()) + 1
        scores.append(by_cluster(one.row_scores(), code, G))
        informations.append(one.cluster_information(code, G))
        margins.append(one.margins(code, np.array([rows.event.sum()], dtype=float)))
    low, high = margins
    both = Margins(
        np.concatenate([low.first, low.first[-1] + high.first[1:]]),
        *(np.concatenate(pair) for pair in ((low.shares, high.shares), (low.residuals, high.residuals))),
        np.concatenate([low.cross, high.cross]),
    )
    return Solution(beta, ([0], [1]), np.concatenate(scores), np.concatenate(informations), both)


DESIGNS = {
    "OLS": Design(linear),
    "OLS, slopes": Design(linear, (5, 100), 0.5),
    "GLM, binary": Design(logistic),
    "GEE, normal": Design(equations(False)),
    "GEE, binary": Design(equations(True)),
    "Cox": Design(survival, (1, 40)),
    "ordinal": Design(categories("logit")),
    "multinomial": Design(categories("baseline")),
}


def draw(rng: np.random.Generator, design: Design, clusters: int) -> pd.DataFrame:
    """Draw a table: clusters with a normal effect of standard deviation .6."""
    size = rng.integers(design.sizes[0], design.sizes[1] + 1, clusters)
    cluster = np.repeat(np.arange(clusters), size)
    n = len(cluster)
    z = rng.normal(size=n)
    slope = (design.slopes * rng.normal(size=clusters))[cluster]
    effect = (0.6 * rng.normal(size=clusters))[cluster] + slope * z
    latent = effect + rng.logistic(size=n)
    time, end = rng.exponential(np.exp(-effect)), rng.uniform(0.5, 4.0, n)
    return pd.DataFrame(
        {
            "cluster": cluster,
            "x": rng.normal(size=clusters)[cluster],
            "z": z,
            "y": effect + rng.normal(size=n),
            "b": (latent > 0.0) * 1.0,
            "o": np.digitize(latent, [-1.0, 1.0]),
            "time": np.minimum(time, end),
            "event": (time <= end) * 1,
        }
    )


def intervals(found: Solution, clusters: int, correction: str) -> tuple[Any, Clustering]:
    """Return standard errors, and effective numbers of clusters and degrees of freedom."""
    inverse = np.linalg.inv(found.information.sum(axis=0))
    arrays = found.score, found.information, inverse, np.eye(len(inverse)), POWERS[correction]
    sums = corrected_sums(*arrays, found.margins)
    own = Clustering("cluster", clusters, 1.0 / sums.concentration, correction)
    return np.sqrt(np.diag(inverse @ sums.meat @ inverse)), own


def coverage(name: str, clusters: int, runs: int) -> dict[str, Any]:
    """Share of intervals of 95 % that cover zero, with and without the correction, and of alarms."""
    design, rng = DESIGNS[name], np.random.default_rng([clusters, list(DESIGNS).index(name)])
    hits, announced, df, failed = [], 0, [], 0
    for _ in range(runs):
        try:
            found = design.solve(draw(rng, design, clusters))
            both = {correction: intervals(found, clusters, correction) for correction in ("CR2", "CR0")}
        except np.linalg.LinAlgError:
            failed += 1
            continue
        if np.abs(found.beta).max() > 10.0:
            failed += 1  # a fit refuses outcomes that are separated
            continue
        row = []
        for correction, (se, own) in both.items():
            ratio = np.abs(found.beta) / se
            limit = stats.t.isf(0.025, own.df) if correction == "CR2" else 1.959964
            row += [(ratio < limit)[place].mean() for place in found.places]
            if correction == "CR2":
                df.append([own.df[place].mean() for place in found.places])
                announced += int(min(own.effective[place].min() for place in found.places) < FEW)
        hits.append(row)
    x, z, plain_x, plain_z = np.mean(hits, axis=0).round(3).tolist()
    df_x, df_z = np.mean(df, axis=0).round(1).tolist()
    return {
        "design": name,
        "clusters": clusters,
        "runs": len(hits),
        "x": x,
        "z": z,
        "df_x": df_x,
        "df_z": df_z,
        "announced": round(announced / len(hits), 2),
        "uncorrected_x": plain_x,
        "uncorrected_z": plain_z,
        "failed": failed,
    }


def main(runs: int = 300, *names: str) -> None:
    """Run the designs and write a row for each number of clusters."""
    for design in names or DESIGNS:
        name, _, number = design.partition("/")
        for clusters in [int(number)] if number else CLUSTERS:
            row = coverage(name, clusters, runs)
            print(row, flush=True)
            frames = [pd.DataFrame([row])]
            if RESULTS.exists():
                done = pd.read_csv(RESULTS)
                frames.insert(0, done[(done["design"] != name) | (done["clusters"] != clusters)])
            pd.concat(frames).to_csv(RESULTS, index=False)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300, *sys.argv[2:])
