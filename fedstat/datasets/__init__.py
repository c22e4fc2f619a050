"""Simulated data of several sites, together with the true parameters.

Sites with different columns: :func:`make_sme` imitates a published study of enterprise profit whose
data are not public, :func:`load_sme` reads a packaged sample of it, :func:`make_sme_risk` imitates one of
their risk with columns of mixed kinds, :func:`make_selection` is a published study of selection among
columns, :func:`make_cluster_experiment` is one of clusters over sites, and :func:`make_clusters` and
:func:`make_blocks` are small general simulators. Sites with different rows: :func:`make_logistic_sites`
follows a published comparison of federated methods, :func:`make_hospitals` imitates the heart disease
data of four hospitals, and :func:`make_survival` is follow-up until death in four hospitals.

:func:`load_adults`, :func:`load_card_holders`, :func:`load_hospitals`, :func:`load_scans` and
:func:`load_weather` read recorded data that are not part of the package where they are at hand, and simulate
otherwise.
"""

from fedstat.datasets.blocks import make_blocks
from fedstat.datasets.clusters import SimulatedClusters, make_cluster_experiment, make_clusters
from fedstat.datasets.horizontal import (
    SimulatedSites,
    make_hospitals,
    make_logistic_sites,
    make_repeated,
    make_survival,
)
from fedstat.datasets.recorded import (
    load_adults,
    load_card_holders,
    load_hospitals,
    load_scans,
    load_weather,
)
from fedstat.datasets.selection import SimulatedSelection, load_selection_published, make_selection
from fedstat.datasets.simulation import SimulatedData
from fedstat.datasets.sme import load_sme, load_sme_published, make_sme, make_sme_risk, write_sme_sample

__all__ = [
    "SimulatedClusters",
    "SimulatedData",
    "SimulatedSelection",
    "SimulatedSites",
    "load_adults",
    "load_card_holders",
    "load_hospitals",
    "load_scans",
    "load_selection_published",
    "load_sme",
    "load_sme_published",
    "load_weather",
    "make_blocks",
    "make_cluster_experiment",
    "make_clusters",
    "make_hospitals",
    "make_logistic_sites",
    "make_repeated",
    "make_selection",
    "make_sme",
    "make_sme_risk",
    "make_survival",
    "write_sme_sample",
]
