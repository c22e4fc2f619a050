"""The enterprise profit and enterprise risk studies, simulated, and the published estimates."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import expit, ndtri
from scipy.stats import poisson

from fedstat import data
from fedstat.datasets import simulation
from fedstat.datasets.selection import SimulatedSelection
from fedstat.typing import Array, Floats

# ----------------------------------------------------------------------------------------------------
# The enterprise profit study, simulated; its packaged sample and its published estimates.
#
# Source: Tang, Wang, Feng and Li, "Enterprise profit prediction using multiple data sources with missing
# values through vertical federated learning" (TWFL), whose data are not public.

SME_ENTERPRISES = 166_207
SME_COMPLETE = 96
SME_R2 = 0.757
SME_RHO = 0.28
SME_SAMPLE = 5_000
SME_MISSING = {
    "Credit Agency": 0.4635,
    "Market Supervision": 0.8761,
    "Judicial Organ": 0.9305,
    "Industry and Commerce Bureau": 0.0091,
    "Law-enforcement Agency": 0.9328,
}
SME_RESPONSE_HOLDER = "Platform"


def make_sme(
    n: int = SME_ENTERPRISES,
    seed: int | np.random.Generator = 0,
    *,
    missing: simulation.Mechanism = "mcar",
    skew: bool = False,
    between: float = 0.0,
) -> simulation.SimulatedData:
    """Simulate the enterprise profit study of TWFL, section 5.

    Five sites hold 35 standardized covariates (mean 0, standard deviation 1 in the population),
    with a mean absolute correlation of .28 within a site. The true coefficients are the published
    CC-VFEM estimates, and the error variance makes the R-squared of a fully observed enterprise .757.
    The response ``NPGR`` (net profit growth rate) is known for every enterprise and is held by a site
    of its own, "Platform", because no site that the publication names has a record of all
    enterprises. The intercept was not published and is 0; the unit of ``NPGR`` follows from the
    coefficients.

    The shares without a record are the published ones, 46.35 (Credit Agency), 87.61 (Market Supervision),
    93.05 (Judicial Organ), .91 (Industry and Commerce Bureau) and 93.28 % (Law-enforcement Agency), as exact
    counts. TWFL print 53.65 % for the Credit Agency; their Single method has 89,170 rows, which is 53.65 %
    of all enterprises, so that figure is taken as the share with a record. Independent records would leave
    about 51 complete enterprises; exactly n * 96 / 166,207 (rounded) are complete here, as published.

    Parameters
    ----------
    n : int
        Number of enterprises, at least 200.
    seed : int or numpy.random.Generator
        Source of randomness. The truth does not depend on it.
    missing : {"mcar", "mar"}
        "mcar": records are lacking at random. "mar": small enterprises lack records: a record at the
        Industry and Commerce Bureau is more likely with a high response, one at any other site with a
        high response and, where the Bureau has the enterprise, a high ``CAPITAL``.
    skew : bool
        Whether the covariates are lognormal with a normal copula, winsorized at 1 % at both ends and
        then standardized, instead of normal.
    between : float
        Mean absolute correlation between covariates of different sites (before ``skew``); .03 was
        published.

    Returns
    -------
    SimulatedData
        With the key ``enterprise_id``.

    Raises
    ------
    ModelError
        If an argument is out of its range.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_sme(500)
    >>> len(data.frames), len(data.truth), data.response
    (6, 35, 'NPGR')
    """
    simulation.require_argument(n >= 200, f"make_sme: expected n of at least 200 enterprises, received {n}.")
    simulation.require_argument(
        missing in simulation.SLOPES,
        f"make_sme: expected missing to be 'mcar' or 'mar', received {missing!r}.",
    )
    rng = np.random.default_rng(seed)
    population = _sme_population(skew, between)
    X = population.draw_covariates(n, rng)
    y = population.draw_response(X, rng)
    seen = _sme_presence(n, simulation.SLOPES[missing]).draw_with_complete(
        round(n * SME_COMPLETE / SME_ENTERPRISES),
        population.standardize(y),
        X[:, population.variables.index("CAPITAL")],
        rng,
    )
    return simulation.assemble(population, X, y, seen, "enterprise_id", "NPGR", SME_RESPONSE_HOLDER)


def load_sme() -> dict[str, pd.DataFrame]:
    """Read the packaged sample of 5,000 simulated enterprises.

    Returns
    -------
    dict of str to DataFrame
        One table per site, keyed by ``enterprise_id``: "Platform" with the response ``NPGR``, then
        the five sites of :func:`make_sme`. Simulated; see ``data/sme/README.md``.

    Examples
    --------
    >>> import fedstat as fs
    >>> frames = fs.datasets.load_sme()
    >>> frames["Platform"].columns.tolist(), len(frames["Platform"])
    (['enterprise_id', 'NPGR'], 5000)
    """
    folder = _data_folder() / "sme"
    sites = (SME_RESPONSE_HOLDER, *SME_MISSING)
    return {site: _read_csv(folder / _file_name(site)) for site in sites}


def load_sme_published() -> pd.DataFrame:
    """Read the estimates that TWFL published for the enterprise profit study.

    Returns
    -------
    DataFrame
        35 rows, index ``variable``, with ``site``, ``client_missing_share`` as printed and, for each of
        ``single``, ``cc``, ``impute``, ``cc_vfem`` and ``impute_vfem``, the columns ``_coef``, ``_se`` and
        ``_significant`` (1: starred). Single uses the covariates of the Credit Agency only and is NaN
        elsewhere.

    Examples
    --------
    >>> import fedstat as fs
    >>> fs.datasets.load_sme_published().shape
    (35, 17)
    """
    return _read_csv(_data_folder() / "sme" / "published.csv").set_index("variable")


def write_sme_sample(folder: str | Path) -> list[Path]:
    """Write the sample that :func:`load_sme` reads, one CSV file per site.

    Parameters
    ----------
    folder : str or Path
        Where to write; made if it does not exist.

    Returns
    -------
    list of Path
        The files, values rounded to 5 decimals.

    Examples
    --------
    >>> import tempfile
    >>> import fedstat as fs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = fs.datasets.write_sme_sample(folder)
    >>> [file.name for file in files][:2]
    ['platform.csv', 'credit-agency.csv']
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    frames = make_sme(SME_SAMPLE, seed=0).frames
    for site, frame in frames.items():
        frame.round(5).to_csv(folder / _file_name(site), index=False, lineterminator="\n")
    return [folder / _file_name(site) for site in frames]


def _sme_population(skew: bool, between: float) -> simulation.Population:
    published = load_sme_published()
    sites = tuple(SME_MISSING)
    owner = published["client"].map(sites.index).to_numpy(np.int64)
    loadings = np.concatenate(
        [simulation.alternating_loadings(int(size), SME_RHO) for size in np.bincount(owner)]
    )
    return simulation.Population(
        sites=sites,
        variables=tuple(published.index),
        owner=owner,
        loadings=loadings,
        factor_correlation=simulation.factor_correlation(owner, loadings, between),
        beta=published["cc_vfem_coef"].to_numpy(np.float64),
        r2=SME_R2,
        skew=skew,
    )


def _sme_presence(n: int, slope: float) -> simulation.MissingnessModel:
    counts = tuple(round(n * (1 - share)) for share in SME_MISSING.values())
    return simulation.MissingnessModel(
        counts, leader=list(SME_MISSING).index("Industry and Commerce Bureau"), slope=slope
    )


def _file_name(site: str) -> str:
    return site.lower().replace(" ", "-") + ".csv"


def _read_csv(file: Path) -> pd.DataFrame:
    with file.open("r", encoding="utf-8") as stream:
        return pd.read_csv(stream)


def _data_folder() -> Path:
    """Find the files of :mod:`fedstat.data`: where it is installed, or at the top of a source tree."""
    installed = Path(data.__file__).parent
    return installed if (installed / "sme").is_dir() else installed.parents[1] / "data"


# ----------------------------------------------------------------------------------------------------
# The enterprise risk study, simulated: columns of mixed kinds, records that small enterprises lack.
#
# Source: Tang, Feng, Li and Wang, "Data privatization in vertical federated learning with client-wise
# missing problem", arXiv 2511.20876 (TFLW), section 6, whose data are not public.

SME_RISK_ENTERPRISES = 71_827
SME_RISK_COMPLETE = 184
SME_RISK_MISSING = {
    "Platform": 0.0,
    "Credit Agency": 0.7234,
    "Judicial Organ": 0.8353,
    "Law-enforcement Agency": 0.8733,
    "Market Supervision": 0.2711,
}
SME_RISK_COLUMNS = {
    "Platform": ("PL", 7),
    "Credit Agency": ("CA", 12),
    "Judicial Organ": ("JO", 8),
    "Law-enforcement Agency": ("LE", 8),
    "Market Supervision": ("MS", 19),
}
LEADER = "Market Supervision"
"""It has most enterprises, and its first column says with the response who has records elsewhere."""
RISKY = 0.12
"""Share of risky enterprises if the log odds were normal; .11 for the drawn ones."""
EFFECT = 0.25
"""Effect of one standard deviation of an active column on the log odds."""
WITHIN, BETWEEN = 0.28, 0.1
"""Mean absolute correlation of the scores behind the columns, within and between sites."""
CUTS: Floats = ndtri(np.array([0.2, 0.45, 0.7, 0.9]))
COUNTS: Floats = ndtri(poisson.cdf(np.arange(16), 2.0))
MARGINS: dict[str, Callable[[Floats], Floats]] = {
    "continuous": lambda z: z,
    "skewed": lambda z: np.exp(0.75 * z),
    "binary": lambda z: (z > ndtri(0.7)).astype(float),
    "count": lambda z: np.searchsorted(COUNTS, z).astype(float),
    "ordinal": lambda z: np.searchsorted(CUTS, z).astype(float),
    "zero-inflated": lambda z: np.maximum(np.exp(z) - math.exp(ndtri(0.6)), 0.0),
}
"""Columns as increasing functions of a standard normal score, which sites' columns take in turn."""


def make_sme_risk(
    n: int = SME_RISK_ENTERPRISES,
    seed: int | np.random.Generator = 0,
    *,
    missing: simulation.Mechanism = "mar",
) -> SimulatedSelection:
    """Simulate the enterprise risk study of TFLW, section 6: 71,827 enterprises, five sites.

    Behind the 54 covariates are normal scores with mean absolute correlations of .28 within and .1 between
    sites; the columns are continuous, skewed, binary, counts, ordinal (0 to 4) and zero-inflated in
    turn. The response ``RISK`` is 1 for about 11 % of the enterprises, with log odds that are linear in the
    columns: the first half of every site's columns have effects of -.25 and .25 of a standard
    deviation in turn, the others none.

    The shares without a record are the published ones, 0, 72.34, 83.53, 87.33 and 27.11 %, as exact counts,
    and exactly n * 184 / 71,827 (rounded) enterprises are complete. This generator chooses what the
    publication leaves open: names of sites and columns, the columns of each site (19 columns
    at the site that lacks 27.11 % are published), their distributions, correlations and effects. No figure of
    the publication is claimed for these data.

    Parameters
    ----------
    n : int
        Number of enterprises, at least 1,000.
    seed : int or numpy.random.Generator
        Source of randomness. The truth does not depend on it.
    missing : {"mar", "mcar"}
        "mar": a record at "Market Supervision" is more likely for risky enterprises, one at the other
        sites for risky enterprises and, where "Market Supervision" has the enterprise, a high ``MS1``;
        "Platform" has all. "mcar": records are lacking at random.

    Returns
    -------
    SimulatedSelection
        With the key ``enterprise_id`` and the response ``RISK``; ``coef`` is per unit of a column.

    Raises
    ------
    ModelError
        If an argument is out of its range.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_sme_risk(2_000)
    >>> {client: len(frame) for client, frame in data.frames.items()}["Credit Agency"]
    553
    """
    simulation.require_argument(
        n >= 1_000, f"make_sme_risk: expected n of at least 1,000 enterprises, received {n}."
    )
    simulation.require_argument(
        missing in simulation.SLOPES,
        f"make_sme_risk: expected missing to be 'mcar' or 'mar', received {missing!r}.",
    )
    rng = np.random.default_rng(seed)
    population, kinds = _population(), _kinds()
    scores = population.draw_covariates(n, rng)
    X = np.column_stack([MARGINS[kind](z) for kind, z in zip(kinds, scores.T, strict=True)])
    columns = [MARGINS[kind](simulation.NORMAL_GRID) for kind in kinds]
    coef = population.beta / np.array([column.std() for column in columns])
    intercept = _intercept(population.explained()) - float(coef @ [column.mean() for column in columns])
    y = (rng.uniform(size=n) < expit(intercept + X @ coef)).astype(np.float64)
    lead = scores[:, population.variables.index(SME_RISK_COLUMNS[LEADER][0] + "1")]
    seen = _draw_presence(n, y, lead, simulation.SLOPES[missing], rng)
    return _lay_out(population, kinds, X, y, coef, intercept, seen)


def _population() -> simulation.Population:
    """Law of the scores, and effects per standard deviation."""
    sizes = [size for _, size in SME_RISK_COLUMNS.values()]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    loadings = np.concatenate([simulation.alternating_loadings(size, WITHIN) for size in sizes])
    beta = [EFFECT * (-1.0) ** (j + 1) if j < size // 2 else 0.0 for size in sizes for j in range(size)]
    return simulation.Population(
        sites=tuple(SME_RISK_COLUMNS),
        variables=tuple(f"{name}{j + 1}" for name, size in SME_RISK_COLUMNS.values() for j in range(size)),
        owner=owner,
        loadings=loadings,
        factor_correlation=simulation.factor_correlation(owner, loadings, BETWEEN),
        beta=np.array(beta),
        r2=0.5,
    )


def _kinds() -> list[str]:
    """Kinds of the columns, starting again at every site."""
    return [str(kind) for _, size in SME_RISK_COLUMNS.values() for kind in np.resize(list(MARGINS), size)]


def _intercept(variance: float) -> float:
    """Intercept at which the share of risks is `RISKY`, were the log odds normal."""
    draws = math.sqrt(variance) * simulation.NORMAL_GRID
    return float(brentq(lambda at: expit(at + draws).mean() - RISKY, -20.0, 20.0))


def _draw_presence(n: int, y: Floats, lead: Floats, slope: float, rng: np.random.Generator) -> Array:
    """Draw who has a record of whom, (n, 5): the first site of everybody."""
    others = {site: share for site, share in SME_RISK_MISSING.items() if share > 0.0}
    distribution = simulation.MissingnessModel(
        tuple(round(n * (1 - share)) for share in others.values()), list(others).index(LEADER), slope
    )
    complete = round(n * SME_RISK_COMPLETE / SME_RISK_ENTERPRISES)
    risk = (y - RISKY) / math.sqrt(RISKY * (1 - RISKY))
    seen = distribution.draw_with_complete(complete, risk, lead, rng)
    return np.column_stack([np.ones(n, dtype=np.bool_), seen])


def _lay_out(
    population: simulation.Population,
    kinds: list[str],
    X: Floats,
    y: Floats,
    coef: Floats,
    intercept: float,
    seen: Array,
) -> SimulatedSelection:
    """Cut what was drawn into tables of sites."""
    names = pd.Index(population.variables, name="variable")
    complete = simulation.numbered_entities(X, names, y, "enterprise_id", "RISK")
    frames = {
        site: complete.loc[
            seen[:, k],
            ["enterprise_id", *(["RISK"] if k == 0 else []), *names[population.owner == k]],
        ].reset_index(drop=True)
        for k, site in enumerate(population.sites)
    }
    truth = pd.DataFrame(
        {"client": np.asarray(population.sites)[population.owner], "type": kinds, "coef": coef}, index=names
    )
    return SimulatedSelection(frames, "enterprise_id", "RISK", truth, intercept, complete)
