"""One fit when sites hold different rows: the sites, the address, and masking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstat.federation.design.horizontal_design import (
    RowsDesign,
    RowsSchema,
    assemble_design,
    moment_requests,
    open_requests,
)
from fedstat.federation.message import Reply, Request
from fedstat.federation.protocols.engine import Fit, FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.typing import Array, Floats

RULES_ON_ROWS = (
    "Some rules need the rows, and only the site can apply them: minimum events, minimum rows per level, "
    "answers that differ in a few rows, and rows that a coefficient or a weight would single out."
)
"""Values of a fit over rows that no dry run can know."""


@dataclass(frozen=True, slots=True)
class RowsSession:
    """Addresses of one fit: whose steps are asked of which sites, and whether these mask their sums."""

    family: str
    sites: tuple[str, ...]
    session: str
    agreed: Callable[[], RowsSchema]
    masked: bool

    @property
    def agreement(self) -> RowsSchema:
        """What has been agreed on so far: transforms perhaps at the beginning of the fit only."""
        return self.agreed()

    def request(self, site: str, step: str, arrays: Mapping[str, Array], text: str = "") -> Request:
        """Address one step."""
        return Request(site, self.family, step, arrays, self.session, text)

    def request_all(self, step: str, arrays: Mapping[str, Array], text: str = "") -> list[Request]:
        """Address one step to all sites."""
        return [self.request(site, step, arrays, text) for site in self.sites]

    def opening(self) -> list[Request]:
        """Ask for the rows to be opened, and for the moments of their columns."""
        return open_requests(self.agreement, self.session) + moment_requests(self.agreement, self.session)

    def opened(self, replies: Sequence[Reply]) -> RowsDesign:
        """Read the replies to :meth:`opening`, and perhaps to more that was asked after it."""
        K = len(self.sites)
        return assemble_design(self.agreement, replies[:K], replies[K : 2 * K])

    def own_moments(self, replies: Sequence[Reply]) -> Floats | None:
        """Means and deviations by site, (K, 2, p), from the replies to :meth:`opening`; None where masked."""
        if self.masked:
            return None
        K = len(self.sites)
        n, total, squares, _ = np.array([r.arrays["moments"] for r in replies[K : 2 * K]]).swapaxes(0, 1)
        return np.stack([total / n, np.sqrt(squares / n)], axis=1)

    @property
    def masked_sites(self) -> tuple[str, ...]:
        """Sites that mask their sums: all, or none."""
        return self.sites if self.masked else ()

    def hide(self, protocol: FitProtocol[Fit]) -> FitProtocol[Fit]:
        """Mask a protocol's sums, if they shall be."""
        return (
            masked_protocol(protocol, self.sites, self.session, sums_only=True) if self.masked else protocol
        )


def add(replies: Sequence[Reply], name: str) -> Array:
    """Add an array up over replies, in their order."""
    total: Array = np.sum([reply.arrays[name] for reply in replies], axis=0)
    return total
