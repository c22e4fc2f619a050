"""A partition of synthetic rows, on which a whole analysis can be tried."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.errors import DataWarning, warn
from fedstat.federation.door.owner.policy import Policy
from fedstat.federation.partition.partition import ClientPartition
from fedstat.models.copula.bounds import Bounds, IntoBound
from fedstat.models.copula.model import CopulaSynthesizer
from fedstat.progress_line import tells_progress

NUMBER = "entity"
"""Key of synthetic rows, where that of the partition is none or of several columns."""


@tells_progress
def rehearse(
    partition: ClientPartition,
    epsilon: float,
    bounds: Bounds | Mapping[str, IntoBound] | None = None,
    *,
    delta: float = 1e-6,
    seed: int | None = None,
    policy: Policy | str | None = None,
    progress: bool | None = None,
) -> ClientPartition:
    """Make a partition of synthetic rows with the columns, kinds and presence of a real one.

    A script can be written and tried on it, models, receipts and plots, before the institutions are asked for
    more than the one private release behind the rows. Estimates on it are not those of the data: they miss
    what is no Gaussian copula, and their standard errors count no noise.

    Parameters
    ----------
    partition : ClientPartition
        In the vertical layout, at sites whose owners allow a budget.
    epsilon, delta : float
        As in :class:`CopulaSynthesizer`; every site is charged once.
    bounds : Bounds or mapping, optional
        What is public of every column; by default what the owners have published.
    seed : int, optional
        To draw the same rows again from the same release.
    policy : Policy or str, optional
        Of the rehearsal's sites, such as ``"strict"``; by default open, since rows are synthetic.
    progress : bool, optional
        Tell how far the computation has come (:func:`fedstat.progress`).

    Returns
    -------
    ClientPartition
        In one process, with as many entities. Each institution has records of as many as it has, together
        with whom it has them; but who lacks a record does not depend on any value, and no cell is missing
        within a record. Keys are numbers.

    Raises
    ------
    ModelError, DescriptionError, EstimationError
        As :meth:`CopulaSynthesizer.fit`.

    Warns
    -----
    DataWarning
        The rows are synthetic.

    Examples
    --------
    >>> import warnings
    >>> import fedstat as fs
    >>> table = fs.datasets.make_hospitals()[["age", "sex", "chol"]].dropna()
    >>> budget = fs.Policy(privacy=fs.Budget(epsilon=5.0, delta=1e-6))
    >>> held = {"Registry": ["age", "sex"], "Laboratory": ["chol"]}
    >>> partition = fs.ClientPartition.from_frame(table, columns=held, policy=budget)
    >>> bounds = fs.Bounds({"age": (20, 80), "sex": [0, 1], "chol": (80, 600)})
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     rehearsal = fs.rehearse(partition, epsilon=3.0, bounds=bounds)
    >>> rehearsal.clients, rehearsal.n_entities == len(table)
    (('Registry', 'Laboratory'), True)
    """
    synthesizer = CopulaSynthesizer(partition, epsilon, bounds, delta=delta)
    fit = synthesizer.fit()
    rows = fit.sample(partition.n_entities, seed)
    key = partition.key[0] if len(partition.key) == 1 else NUMBER
    frames = {}
    for client, columns in synthesizer.columns.items():
        frames[client] = rows.loc[partition.rows[client], list(columns)]
        frames[client].insert(0, key, partition.rows[client])
    made = ClientPartition.from_frames(frames, on=key, policy=policy, min_count=partition.min_count)
    warn(
        f"rows are synthetic, from one release with epsilon {epsilon:g}: who lacks a record depends on no "
        "value, no cell is missing within a record, and standard errors of fits count no noise",
        DataWarning,
    )
    return made
