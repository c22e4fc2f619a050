"""The covariance of psi = (a, s2, beta_1, mu_1, beta_2, mu_2, ...), and where each parameter stands in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedstat.models.vfem.moments.cross_products import CrossProducts
from fedstat.typing import Floats

SCALE = 1
"""Place of the residual variance, which only a normal response has."""


@dataclass(frozen=True, slots=True)
class Covariance:
    """Covariance of psi, (2 + 2p, 2 + 2p); of a response that is not normal t_1, ..., t_K follow.

    `how` says where cross-products came from, `size` and `error` the rows and the relative error of a sketch,
    `moved` how far the products went, relatively, to be positive semi-definite, and `dealers` who dealt for
    secure ones; `left_out` counts the pairs of institutions with too few common entities to be asked.
    `asymmetry` is that of supplemented EM before it was made symmetric.
    """

    psi: Floats
    how: str = "none"
    size: int = 0
    error: float = 0.0
    moved: float = 0.0
    asymmetry: float = 0.0
    dealers: str = ""
    left_out: int = 0

    @classmethod
    def of(cls, psi: Floats, products: CrossProducts, moved: float, asymmetry: float = 0.0) -> Covariance:
        """Put a covariance together with where its cross-products came from."""
        return cls(
            psi,
            how=products.how,
            size=products.size,
            error=products.error,
            moved=moved,
            asymmetry=asymmetry,
            dealers=products.dealers,
            left_out=products.left_out,
        )


@dataclass(frozen=True, slots=True)
class Places:
    """Where each institution's beta and mu stand in psi."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Length of psi."""
        return 2 + 2 * sum(self.sizes)

    def start(self, k: int) -> int:
        """First place of institution k."""
        return 2 + 2 * sum(self.sizes[:k])

    def beta(self, k: int) -> slice:
        """Places of beta_k."""
        return slice(self.start(k), self.start(k) + self.sizes[k])

    def mu(self, k: int) -> slice:
        """Places of mu_k."""
        return slice(self.start(k) + self.sizes[k], self.start(k) + 2 * self.sizes[k])

    def both(self, k: int) -> slice:
        """Places of (beta_k, mu_k)."""
        return slice(self.start(k), self.start(k) + 2 * self.sizes[k])


def psi_names(clients: Sequence[str], names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Name each place of psi, for messages."""
    out = ["Intercept", "residual variance"]
    for k in clients:
        out += [f"{name} ({k})" for name in names[k]] + [f"mean of {name} ({k})" for name in names[k]]
    return out
