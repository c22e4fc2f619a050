"""Draw the two figures of paper.md: python paper/figures.py."""

import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import statsmodels.api as sm

import fedstat as fs

FOLDER = Path(__file__).parent
CORRELATIONS = (0.0, 0.2, 0.4, 0.6, 0.8)
SAMPLES = 20


def draw_forest():
    """Figure 1: the coefficient of capital in Grunfeld's data, by company."""
    books = sm.datasets.grunfeld.load_pandas().data
    partition = fs.ClientPartition.from_frame(books, by="firm")
    result = fs.FederatedOLS.from_formula("invest ~ value + capital", partition).fit()
    ax = result.heterogeneity.plot_forest("capital", effect="effect of capital")
    ax.figure.savefig(FOLDER / "forest.png", dpi=150, bbox_inches="tight")


def simulate(rho, random, n=1_000):
    """Tables of three sites: y, a, and b, of which half of the records are missing; y = a + b + e."""
    a, b, e = random.normal(size=(3, n))
    b = rho * a + np.sqrt(1 - rho**2) * b
    table = pd.DataFrame({"id": np.arange(n), "y": a + b + e, "a": a, "b": b})
    present = {"y": slice(None), "a": slice(None), "b": random.random(n) < 0.5}
    return {name: table.loc[rows, ["id", name]] for name, rows in present.items()}


def estimates(frames):
    """Estimates of the coefficient of a, whose true value is 1."""
    partition = fs.ClientPartition.from_frames(frames, on="id")
    found = {
        label: fs.VFEMRegression.from_formula("y ~ a + b", partition, between=between).fit().params["a"]
        for label, between in (("fedstat (free)", "free"), ("fedstat (independent)", "independent"))
    }
    y, a, b = (frame.set_index("id").iloc[:, 0] for frame in frames.values())
    b = b.reindex(y.index)
    columns = pd.DataFrame({"one": 1.0, "a": a, "b": b.fillna(b.mean())})
    return found | {"mean imputation, joined table": sm.OLS(y, columns).fit().params["a"]}


def draw_estimates():
    """Figure 2: means and standard deviations of estimates over samples, by correlation between sites."""
    random = np.random.default_rng(1)
    warnings.simplefilter("ignore", fs.errors.FedstatWarning)
    samples = {
        rho: pd.DataFrame([estimates(simulate(rho, random)) for _ in range(SAMPLES)]) for rho in CORRELATIONS
    }
    figure, ax = plt.subplots(figsize=(6.0, 3.2))
    ax.axhline(1.0, color="0.6", linewidth=0.8)
    for i, label in enumerate(samples[CORRELATIONS[0]]):
        mean = [table[label].mean() for table in samples.values()]
        spread = [table[label].std() for table in samples.values()]
        ax.errorbar(np.add(CORRELATIONS, 0.012 * (i - 1)), mean, spread, fmt="o-", markersize=4, label=label)
    ax.set(xlabel="correlation between columns of two sites", ylabel="estimate (true value 1)")
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(FOLDER / "estimates.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    draw_forest()
    draw_estimates()
