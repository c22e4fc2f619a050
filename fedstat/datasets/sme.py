"""The enterprise profit study, simulated; its packaged sample and its published estimates.

Source: Tang, Wang, Feng and Li, "Enterprise profit prediction using multiple data sources with missing
values through vertical federated learning" (TWFL), whose data are not public.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedstat import data
from fedstat.datasets.population import Population, alternating_loadings, factor_correlation, require
from fedstat.datasets.presence import SLOPES, Mechanism, PresenceLaw
from fedstat.datasets.simulated import SimulatedData, assemble

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
    missing: Mechanism = "mcar",
    skew: bool = False,
    between: float = 0.0,
) -> SimulatedData:
    """Simulate the enterprise profit study of TWFL, section 5.

    Five institutions hold 35 standardised covariates (mean 0, standard deviation 1 in the population),
    with a mean absolute correlation of .28 within an institution. The true coefficients are the published
    CC-VFEM estimates, and the error variance makes the R-squared of a fully observed enterprise .757.
    The response ``NPGR`` (net profit growth rate) is known for every enterprise and is held by an institution
    of its own, "Platform", because no institution that the publication names has a record of all
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
        Industry and Commerce Bureau is more likely with a high response, one at any other institution with a
        high response and, where the Bureau has the enterprise, a high ``CAPITAL``.
    skew : bool
        Whether the covariates are lognormal with a normal copula, winsorised at 1 % at both ends and
        then standardised, instead of normal.
    between : float
        Mean absolute correlation between covariates of different institutions (before ``skew``); .03 was
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
    require(n >= 200, f"make_sme: expected n of at least 200 enterprises, received {n}.")
    require(missing in SLOPES, f"make_sme: expected missing to be 'mcar' or 'mar', received {missing!r}.")
    rng = np.random.default_rng(seed)
    population = _sme_population(skew, between)
    X = population.draw_covariates(n, rng)
    y = population.draw_response(X, rng)
    seen = _sme_presence(n, SLOPES[missing]).draw_with_complete(
        round(n * SME_COMPLETE / SME_ENTERPRISES),
        population.standardise(y),
        X[:, population.variables.index("CAPITAL")],
        rng,
    )
    return assemble(population, X, y, seen, "enterprise_id", "NPGR", SME_RESPONSE_HOLDER)


def load_sme() -> dict[str, pd.DataFrame]:
    """Read the packaged sample of 5,000 simulated enterprises.

    Returns
    -------
    dict of str to DataFrame
        One table per institution, keyed by ``enterprise_id``: "Platform" with the response ``NPGR``, then
        the five institutions of :func:`make_sme`. Simulated; see ``data/sme/README.md``.

    Examples
    --------
    >>> import fedstat as fs
    >>> frames = fs.datasets.load_sme()
    >>> frames["Platform"].columns.tolist(), len(frames["Platform"])
    (['enterprise_id', 'NPGR'], 5000)
    """
    folder = _data_folder() / "sme"
    clients = (SME_RESPONSE_HOLDER, *SME_MISSING)
    return {client: _read_csv(folder / _file_name(client)) for client in clients}


def load_sme_published() -> pd.DataFrame:
    """Read the estimates that TWFL published for the enterprise profit study.

    Returns
    -------
    DataFrame
        35 rows, index ``variable``, with ``client``, ``client_missing_share`` as printed and, for each of
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
    """Write the sample that :func:`load_sme` reads, one CSV file per institution.

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
    for client, frame in frames.items():
        frame.round(5).to_csv(folder / _file_name(client), index=False, lineterminator="\n")
    return [folder / _file_name(client) for client in frames]


def _sme_population(skew: bool, between: float) -> Population:
    published = load_sme_published()
    clients = tuple(SME_MISSING)
    owner = published["client"].map(clients.index).to_numpy(np.int64)
    loadings = np.concatenate([alternating_loadings(int(size), SME_RHO) for size in np.bincount(owner)])
    return Population(
        clients=clients,
        variables=tuple(published.index),
        owner=owner,
        loadings=loadings,
        factor_correlation=factor_correlation(owner, loadings, between),
        beta=published["cc_vfem_coef"].to_numpy(np.float64),
        r2=SME_R2,
        skew=skew,
    )


def _sme_presence(n: int, slope: float) -> PresenceLaw:
    counts = tuple(round(n * (1 - share)) for share in SME_MISSING.values())
    return PresenceLaw(counts, leader=list(SME_MISSING).index("Industry and Commerce Bureau"), slope=slope)


def _file_name(client: str) -> str:
    return client.lower().replace(" ", "-") + ".csv"


def _read_csv(file: Path) -> pd.DataFrame:
    with file.open("r", encoding="utf-8") as stream:
        return pd.read_csv(stream)


def _data_folder() -> Path:
    """Find the files of :mod:`fedstat.data`: where it is installed, or at the top of a source tree."""
    installed = Path(data.__file__).parent
    return installed if (installed / "sme").is_dir() else installed.parents[1] / "data"
