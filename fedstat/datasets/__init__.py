"""Simulated data held by several institutions, with the truth beside them.

:func:`make_sme` imitates a published study of enterprise profit whose data are not public,
:func:`load_sme` reads a packaged sample of it, and :func:`make_blocks` is a small general simulator.
"""

from fedstat.datasets.blocks import make_blocks
from fedstat.datasets.simulated import SimulatedData
from fedstat.datasets.sme import load_sme, load_sme_published, make_sme, write_sme_sample

__all__ = [
    "SimulatedData",
    "load_sme",
    "load_sme_published",
    "make_blocks",
    "make_sme",
    "write_sme_sample",
]
