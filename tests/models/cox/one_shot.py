"""Estimates next to one-shot approximations: ``python tests/models/cox/one_shot.py [REPEATS]``.

ODAC (Duan et al., "Learning from local to global: An efficient distributed algorithm for modeling
time-to-event data", JAMIA 27, 2020, equation 4): a site adds to its own log-likelihood the expansion of that
of all rows to second order about the mean of the sites' own estimates, weighted by their information. It
supposes a common baseline. ODACH (Luo et al., JAMIA 29, 2022) does the same with the likelihood stratified by
site.
"""

import sys
import warnings

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.kernels.partial_likelihood import PartialLikelihood, RiskTable

ALLOW = fs.Policy(min_events=0, min_level_count=0, min_count=0, max_parameters=1e9, max_share=1.0)
TRUE = np.array([-1.0, 1.0, 0.5])
NAMES = ["x", "z", "w"]


def draw(rng, sites, rows, rate, spread):
    """Weibull times; about a share `rate` has events; `spread` is the deviation of log baselines of sites."""
    site = np.repeat(np.arange(sites), rows)
    n = len(site)
    X = np.column_stack([rng.normal(size=n), rng.random(n) < 0.3, rng.uniform(-1.0, 1.0, n)]).astype(float)
    hazard = np.exp(X @ TRUE + rng.normal(0.0, spread, sites)[site])
    time = (rng.exponential(size=n) / hazard) ** (1.0 / 1.5)
    end = np.quantile(time, rate) * rng.uniform(0.5, 1.5, n)
    stop = np.ceil(np.minimum(time, end) / np.quantile(end, 0.99) * 60.0)
    frame = pd.DataFrame(X, columns=NAMES).assign(
        time=stop, event=(time <= end) * 1, site=[f"S{k:02d}" for k in site]
    )
    return frame


def derivatives(frame, beta, stratified):
    """Return log-likelihood, score and information at a point."""
    X = np.ascontiguousarray(frame[NAMES].to_numpy())
    stratum = pd.factorize(frame["site"])[0] if stratified else None
    stop = frame["time"].to_numpy(dtype=float)
    table = RiskTable.of(np.zeros(len(stop)), stop, frame["event"].to_numpy() == 1, stratum=stratum)
    found = PartialLikelihood.at(table, X, X @ beta, "efron")
    return found.loglik, found.score(), found.information()


def newton(at, start, steps=60):
    """Maximize; None where the information is singular or the estimate runs away."""
    beta = start
    for _ in range(steps):
        _, score, information = at(beta)
        try:
            step = np.linalg.solve(information, score)
        except np.linalg.LinAlgError:
            return None
        size = np.abs(step).max()
        beta = beta + step * min(1.0, 1.0 / size) if size > 0.0 else beta
        if np.abs(beta).max() > 15.0:
            return None
        if size < 1e-10:
            return beta
    return None


def one_shot(frame, stratified):
    """Return ODAC's or ODACH's estimate from the site with most events, and the mean of the sites' own."""
    parts = [part for _, part in frame.groupby("site")]
    own = [newton(lambda b, part=part: derivatives(part, b, False), np.zeros(3)) for part in parts]
    known = [(b, derivatives(part, b, False)[2]) for b, part in zip(own, parts, strict=True) if b is not None]
    if not known:
        return None, None
    start = np.linalg.solve(sum(i for _, i in known), sum(i @ b for b, i in known))
    lead = max(range(len(parts)), key=lambda k: parts[k]["event"].sum())
    n, m = len(frame), len(parts[lead])
    _, all_score, all_information = derivatives(frame, start, stratified)
    _, own_score, own_information = derivatives(parts[lead], start, False)

    def surrogate(beta):
        loglik, score, information = derivatives(parts[lead], beta, False)
        move = beta - start
        gap = all_information / n - own_information / m
        return (
            loglik / m,
            score / m + all_score / n - own_score / m - gap @ move,
            information / m + gap,
        )

    return newton(surrogate, start), start


ESTIMATORS = ("FederatedCox", "ODAC", "ODACH", "meta-analysis")


def compare(sites, rows, rate, spread, repeats, seed=0):
    """Return by estimator the mean distance from the pooled fit and the bias, in its standard errors.

    Both are the largest over coefficients. Also return the mean of the fewest events at a site.
    """
    rng, stratified, events = np.random.default_rng(seed), spread > 0.0, []
    distance, bias = ({name: [] for name in ESTIMATORS} for _ in range(2))
    for _ in range(repeats):
        frame = draw(rng, sites, rows, rate, spread)
        events.append(frame.groupby("site")["event"].sum().min())
        pooled = newton(lambda b, f=frame: derivatives(f, b, stratified), np.zeros(3))
        se = np.sqrt(np.diag(np.linalg.inv(derivatives(frame, pooled, stratified)[2])))
        partition = fs.ClientPartition.from_frame(frame, by="site", policy=ALLOW)
        model = fs.FederatedCox.from_formula("Surv(time, event) ~ x + z + w", partition)
        last = float(frame["time"].max())
        grid = {} if stratified else {"baseline": "common", "grid": 1, "until": last}
        ours = model.fit(local=False, masked=False, **grid).params.to_numpy()
        odac, meta = one_shot(frame, False)
        odach, _ = one_shot(frame, True)
        for name, beta in zip(ESTIMATORS, (ours, odac, odach, meta), strict=True):
            if beta is not None:
                distance[name].append(np.abs((beta - pooled) / se))
                bias[name].append((beta - TRUE) / se)

    def largest(found):
        mean = np.mean(found, axis=0)
        return float(mean[np.abs(mean).argmax()])

    return {name: (largest(distance[name]), largest(bias[name])) for name in ESTIMATORS}, np.mean(events)


def main(repeats=100):
    """Print the table of the vignette."""
    warnings.simplefilter("ignore")
    print(f"| events | baselines | fewest events at a site | {' | '.join(ESTIMATORS)} |")
    print("|---|---|---|---|---|---|---|")
    for rate, spread in ((0.2, 0.0), (0.05, 0.0), (0.2, 0.8), (0.05, 0.8)):
        found, fewest = compare(10, 200, rate, spread, repeats)
        cells = [f"{distance:.1g}, {bias:+.2f}" for distance, bias in found.values()]
        kind = "differ" if spread else "common"
        print(f"| {100 * rate:.0f} % | {kind} | {fewest:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
