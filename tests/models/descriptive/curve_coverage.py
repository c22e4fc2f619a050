"""Coverage of survival curves and cumulative incidences under the default policy, next to the pooled rows.

Two groups of patients at sites of 60, with Weibull times and censoring between 5 and 45 months. Run it with
the number of repetitions and, to have competing events, with "incidence":

    python tests/models/descriptive/curve_coverage.py 300
    python tests/models/descriptive/curve_coverage.py 300 incidence

The protocol and the steps are those of a fit, without messages, checks and masks between them; a test
compares the two. Runs in which a site has one or two patients of an arm with an outcome are left out, as they
are refused. A time is known if an interval ends there, and otherwise its limits are those of the two ends
around it. The last column is the coverage of the same interval from the pooled rows with their exact times,
as survfit has it.
"""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.federation.audit.event_log import SiteLedger
from fedstat.inference.survival_curves import KnownCurve, SurvivalCounts, cumulative_incidence, product_limit
from fedstat.models.descriptive import steps
from fedstat.models.descriptive.protocol import survival_table
from fedstat.models.descriptive.results import CumulativeIncidenceResults, KaplanMeierResults
from fedstat.models.horizontal.blocks import grid_points

TIMES = np.array([1.5, 3.0, 15.0, 30.0])
GRIDS = {"every half month": (0.5, 45.0), "these times": ([1.5, 3.0, 15.0, 30.0, 45.0], None)}
SHARE = 0.6
"""Share of the first cause."""


def patients(rng, sites, competing):
    n = 60 * sites
    time, censored = 20.0 * rng.weibull(1.3, n), rng.uniform(5.0, 45.0, n)
    event = (time <= censored).astype(int)
    if competing:
        event = np.where(event == 1, np.where(rng.uniform(size=n) < SHARE, "first", "second"), "none")
    return pd.DataFrame(
        {
            "site": [f"S{k % sites:02d}" for k in range(n)],
            "months": np.minimum(time, censored),
            "event": event,
            "arm": np.where(np.arange(n) // sites % 2, "a", "b"),
        }
    )


def truth(competing):
    survival = np.exp(-((TIMES / 20.0) ** 1.3))
    return SHARE * (1.0 - survival) if competing else survival


def pooled(table, competing):
    """Return curve and limits of group a at the times, (m, 3), from exact times."""
    own = table[table["arm"] == "a"]
    times, place = np.unique(own["months"], return_inverse=True)
    names = ["none", "first", "second"] if competing else [0, 1]
    cells = np.zeros((len(names), 1, len(times)))
    for k, name in enumerate(names):
        cells[k, 0] = np.bincount(place, own["event"] == name, minlength=len(times))
    counts = SurvivalCounts(times, cells[1:].sum(axis=0), cells[0], np.zeros(1))
    if competing:
        frame = cumulative_incidence(counts, np.moveaxis(cells[1:], 0, -1), 0.05, "log-log")[0][0]
        values, start = frame[["incidence", "conf_low", "conf_high"]].to_numpy(), 0.0
    else:
        frame = product_limit(counts, 0.05, "log-log")[0]
        values, start = frame[["survival", "conf_low", "conf_high"]].to_numpy(), 1.0
    curve = KnownCurve(times, values, start)
    at = np.append(0.0, times)[np.searchsorted(times, TIMES, side="right")]
    return curve.at(at)


class Cells(steps.OpenCells):
    """The opened rows of a site, without the question from which the number of outcomes follows."""

    outcomes = 2
    late = False
    time_columns = ("months",)


class Cells3(Cells):
    outcomes = 3


class Site:
    """A site that answers the steps of curves at once."""

    def __init__(self, name, table, sites, competing):
        self.name, self.sites = name, sites
        causes = ["none", "first", "second"] if competing else [0, 1]
        self.opened = (Cells3 if competing else Cells)(self, steps.CellsRequest("", ""), 2)
        self.opened.group = (table["arm"] == "b").to_numpy().astype(np.int64)
        self.opened.event = pd.Index(causes).get_indexer(table["event"]).astype(np.int64)
        self.opened.number = table["months"].to_numpy()
        self.opened.start, self.opened.rows = np.zeros(len(table)), np.arange(len(table))
        self.opened.sort_times()
        self.policy, self.table = fs.Policy(), SimpleNamespace(n_rows=len(table))
        self.site_ledger = SiteLedger()
        self.masked_among = sites

    def use(self, *_):
        return self.opened

    def report(self, *_):
        pass

    @property
    def rows(self):
        width = self.opened.outcomes
        return np.bincount(self.opened.outcome, minlength=2 * width).reshape(2, width).astype(float)

    def answer(self, step, arrays):
        found = {"rows": self.rows} if step == "open_cells" else getattr(steps, step)(self, self, **arrays)
        return SimpleNamespace(arrays=found)


def counted(table, competing, grid):
    """Return the results of a fit, and None if a site refuses."""
    names = tuple(sorted(table["site"].unique()))
    sites = [Site(name, table[table["site"] == name], names, competing) for name in names]
    rows = np.array([site.rows for site in sites])
    if ((rows > 0) & (rows < 3)).any():
        return None
    question = SimpleNamespace(survival=SimpleNamespace(times=(1,)))
    session = SimpleNamespace(
        agreement=SimpleNamespace(question=question),
        request_all=lambda step, arrays, text="": [(site, step, arrays) for site in sites],
    )
    protocol = survival_table(session, steps.CellsRequest("", ""), grid_points(*grid))
    replies = None
    while True:
        try:
            requests = protocol.send(replies)
        except StopIteration as stop:
            found = stop.value
            break
        replies = [site.answer(step, arrays) for site, step, arrays in requests]
    agreement = SimpleNamespace(
        question=SimpleNamespace(columns=("arm",), subset_text=""),
        spec=SimpleNamespace(levels={"arm": ["a", "b"]}),
        sites=[SimpleNamespace(site=name, n=60, n_rows=60) for name in names],
    )
    causes = SimpleNamespace(survival=SimpleNamespace(causes=("first", "second")))
    model = SimpleNamespace(
        agreement=agreement, formula=SimpleNamespace(response="Surv(months, event)"), question=causes
    )
    results = CumulativeIncidenceResults if competing else KaplanMeierResults
    return results._of(model, found, True, None)


def fitted(table, competing, grid):
    """Return the same from a partition."""
    partition = fs.ClientPartition.from_frame(table, by="site")
    response = "Surv(months, event)"
    if competing:
        response = "Surv(months, C(event, levels=['none', 'first', 'second']))"
    model = fs.CumulativeIncidence if competing else fs.KaplanMeier
    return model.from_formula(f"{response} ~ arm", partition).fit(grid[0], until=grid[1])


def limits(fit, competing):
    """Return curve and limits of group a at the times, (m, 3)."""
    if competing:
        found = fit.incidence_at(TIMES.tolist()).query("group == 'arm=a' and cause == 'first'")
        return found[["incidence", "conf_low", "conf_high"]].to_numpy()
    return (
        fit.survival_at(TIMES.tolist())
        .query("group == 'arm=a'")[["survival", "conf_low", "conf_high"]]
        .to_numpy()
    )


def simulate(sites, grid, repetitions, competing=False, seed=8100):
    """Return a table with a row for each time, and shares of the runs with what the fits have in common."""
    true, ours, theirs, more = truth(competing), [], [], []
    for run in range(repetitions):
        table = patients(np.random.default_rng([seed, sites, run]), sites, competing)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = counted(table, competing, GRIDS[grid])
            if fit is None:
                continue
            found = limits(fit, competing)
        ours.append(found)
        theirs.append(pooled(table, competing))
        row = {"intervals": len(fit.times)}
        if not competing:
            _, low, high = fit.median().loc["arm=a", ["median", "conf_low", "conf_high"]]
            exact = 20.0 * np.log(2.0) ** (1.0 / 1.3)
            row |= {"median": low <= exact <= (np.inf if np.isnan(high) else high)}
            if fit.times[-1] >= 24.0:
                u = np.linspace(0.0, 24.0, 20001)
                mean = np.trapezoid(np.exp(-((u / 20.0) ** 1.3)), u)
                own = fit.restricted_mean(24.0).loc["arm=a"]
                row |= {
                    "mean": own["conf_low"] <= mean <= own["conf_high"],
                    "mean_bias": (own["estimate"] - mean) / own["std_error"],
                }
            tests = (fit.log_rank_test(by_site=one)["p_value"] < 0.05 for one in (True, False))
            row |= dict(zip(("by_site", "pooled"), tests, strict=True))
        else:
            row |= {"gray": fit.gray_test("first")["p_value"] < 0.05}
        more.append(row)
    ours, theirs = np.array(ours), np.array(theirs)
    known = ~np.isnan(ours[:, :, 0])
    inside = (ours[:, :, 1] <= true) & (true <= ours[:, :, 2])
    lost = np.isnan(ours[:, :, 1])
    bias = np.where(known, ours[:, :, 0] - theirs[:, :, 0], 0.0).sum(axis=0) / np.maximum(
        known.sum(axis=0), 1
    )
    out = pd.DataFrame(
        {
            "sites": sites,
            "time": TIMES,
            "true": true,
            "known": known.mean(axis=0),
            "covered if known": (inside & known).sum(axis=0) / np.maximum(known.sum(axis=0), 1),
            "covered": inside.sum(axis=0) / np.maximum((~lost).sum(axis=0), 1),
            "nothing": lost.mean(axis=0),
            "bias": bias / theirs[:, :, 0].std(axis=0),
            "width": np.nanmean(
                (ours[:, :, 2] - ours[:, :, 1]) / (theirs[:, :, 2] - theirs[:, :, 1]), axis=0
            ),
            "pooled rows": ((theirs[:, :, 1] <= true) & (true <= theirs[:, :, 2])).mean(axis=0),
        }
    )
    return out, {"runs": len(more)} | pd.DataFrame(more).astype(float).mean().to_dict()


if __name__ == "__main__":
    repetitions, competing = int(sys.argv[1]), "incidence" in sys.argv
    for grid in GRIDS:
        for sites in (5, 25):
            found, more = simulate(sites, grid, repetitions, competing)
            print(
                grid,
                "\n",
                found.round(3).to_string(index=False),
                "\n",
                {name: round(value, 3) for name, value in more.items()},
                flush=True,
            )
