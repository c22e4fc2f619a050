"""A year in fast motion: records are corrected 50 times while 20 studies make 200 analyses at one site.

Every tenth analysis is a private one, of a second table of the same hospitals that has a budget.
"""

import time
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from operating import main, make_federation
from test_records_change import POLICY, Records
from test_rules_in_force import Federation

import fedstat as fs
from fedstat.errors import PolicyError
from fedstat.federation.disclosure.policy import Budget, Policy
from fedstat.federation.partition.connect import align_connected_sites
from fedstat.federation.transport.remote import RemoteEngine, RemoteSite
from fedstat.federation.transport.signed import SignedSite
from fedstat.privacy.zcdp import epsilon_of_zcdp, rho_of_budget

N, CORRECTED = 2_000, 60
CORRECTIONS, STUDIES, ANALYSES, RESTART, PRIVATE = 50, 20, 200, 10, 10
FORMULAS = ("y ~ x", "y ~ z", "y ~ x + z", "z ~ x")
EPSILONS, DELTA, LIMITS = (0.3, 0.2, 0.25, 0.35), 1e-6, (-3, 3)
BUDGET = 0.6
"""A little more than all four of :data:`EPSILONS` together; the margins of another analysis would fit in."""


def frame(seed):
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(2, N)).round(4)
    return pd.DataFrame(
        {"patient_id": np.arange(N), "x": x, "z": z, "y": (x + z + rng.normal(size=N)).round(4)}
    )


class Guarded(Federation):
    """Other columns of the same 400 people at each hospital, under a privacy budget."""

    def __init__(self, home):
        home.mkdir()
        values = np.random.default_rng(7).normal(size=(400, 3)).clip(*LIMITS).round(3)
        tables = {
            name: pd.DataFrame({"patient_id": np.arange(400), name.lower(): values[:, k]})
            for k, name in enumerate("ABC")
        }
        study = make_federation(home, tables, ["patient_id"], Policy.strict(privacy=Budget(BUDGET, DELTA)))
        for name in "ABC":
            assert main(["site", "describe", str(home / name)]) == 0
            assert main(["site", "consent", str(home / name), *sorted({*"ABC"} - {name})]) == 0
        super().__init__(home)
        engine = RemoteEngine({name: RemoteSite(name, self) for name in "ABC"})
        align_connected_sites(engine, tuple("ABC"), study)

    def restart(self):
        self.close()
        self.sites = {name: SignedSite(self.home / name, name) for name in "ABC"}

    def close(self):
        for site in self.sites.values():
            site.site.site_ledger.store.close()

    def synthesize(self, epsilon):
        """Release the correlations of the three columns under a part of the budget."""
        bounds = dict.fromkeys("abc", LIMITS)
        return fs.CopulaSynthesizer(self.connect(), epsilon=epsilon, bounds=bounds).fit()

    def spent(self):
        return {name: site.site.site_ledger.charges.spent for name, site in self.sites.items()}


class Year:
    """Private analyses, and what the accountant says of them."""

    def __init__(self, guarded):
        self.guarded, self.first = guarded, {}

    def analyze(self, k):
        epsilon = EPSILONS[k % len(EPSILONS)]
        before = self.guarded.spent()
        result = self.guarded.synthesize(epsilon)
        cost = {name: spent - before[name] for name, spent in self.guarded.spent().items()}
        released = result.correlation.to_numpy()
        if epsilon in self.first:
            assert not any(cost.values())
            np.testing.assert_array_equal(released, self.first[epsilon])
            return
        self.first[epsilon] = released
        parts = result.privacy.set_index("record")
        for name, rho in cost.items():
            row = parts.loc[f"its part at {name}"]
            assert float(rho) == pytest.approx(row.rho_margins + row.rho_products, rel=1e-12)
            assert 0.98 * epsilon < epsilon_of_zcdp(rho, DELTA) <= epsilon
            assert rho <= rho_of_budget(epsilon, DELTA)

    def check_end(self):
        """Charges of all sites are those of the four requests, and none of them can be had again."""
        most = sum(Fraction(rho_of_budget(epsilon, DELTA)) for epsilon in EPSILONS)
        spent = self.guarded.spent()
        assert all(0.98 * most < rho <= most for rho in spent.values())
        with pytest.raises(PolicyError, match="privacy budget"):
            self.guarded.synthesize(0.21)
        assert self.guarded.spent() == spent


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*records have changed since:fedstat.errors.DataWarning")
def test_history_budget_and_disk_stay_within_bounds(tmp_path, capsys):
    make_federation(tmp_path, {name: frame(seed) for seed, name in enumerate("ABC")}, policy=POLICY)
    for name in "ABC":
        toml = tmp_path / name / "site.toml"
        toml.write_text(toml.read_text().replace('# key = "patient_id"', 'key = "patient_id"', 1))
    federation, guarded, rng = Federation(tmp_path), Guarded(tmp_path / "guarded"), np.random.default_rng(9)
    records, year, seconds, computed = Records(federation), Year(guarded), [], []
    for k in range(ANALYSES):
        if k and k % (ANALYSES // CORRECTIONS) == 0:
            rows = rng.choice(N, CORRECTED, replace=False)
            records.write(
                lambda found, rows=rows: found.assign(
                    x=np.where(found.index.isin(rows), (found["x"] + 0.1).round(4), found["x"])
                )
            )
            records.reload()
        if k and k % RESTART == 0:
            records.restart()
            guarded.restart()
        if k % PRIVATE == PRIVATE - 1:
            year.analyze(k // PRIVATE)
            continue
        # a study asks for the same model all year
        formula = FORMULAS[k % STUDIES % len(FORMULAS)]
        began = time.perf_counter(), time.process_time()
        result = fs.FederatedOLS.from_formula(formula, federation.connect()).fit(masked=True)
        seconds.append(time.perf_counter() - began[0])
        computed.append(time.process_time() - began[1])
        assert result.nobs == 3 * N
    year.check_end()
    history = federation.sites["B"].site.data.memory
    folder = tmp_path / "B"
    sizes = {name: (folder / name).stat().st_size for name in ("answered.npz", "ledger.jsonl")}
    rows, columns = history.released.n_rows, len(history.released.spaces.atoms)
    first, last = np.median(seconds[:20]), np.median(seconds[-20:])
    first_computed, last_computed = np.median(computed[:20]), np.median(computed[-20:])
    with capsys.disabled():
        print(f"\nhistory {rows} rows, {columns} columns; {sizes}")
        print(f"budget { ({name: float(rho) for name, rho in guarded.spent().items()}) }")
        print(f"seconds per analysis {first:.2f} at the start, {last:.2f} at the end")
        print(f"of the processor     {first_computed:.2f} at the start, {last_computed:.2f} at the end")
    # each correction adds the earlier versions, and at most the columns of a fit
    assert rows <= N + (CORRECTIONS - 1) * CORRECTED
    assert columns <= 5 * CORRECTIONS
    assert sizes["answered.npz"] <= 4 * rows * 5 * CORRECTIONS + 40 * rows
    assert sizes["ledger.jsonl"] <= 20_000 * ANALYSES
    # of which the comparison with all released columns grows; what reads a ledger again grows tenfold
    assert last_computed < 3.0 * first_computed
    guarded.close()
    for site in federation.sites.values():
        site.site.site_ledger.store.close()
