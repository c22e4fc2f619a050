"""What every family's model has in common: a formula, a partition, and an agreed design."""

from __future__ import annotations

import secrets
import warnings
from typing import ClassVar, Self

from fedstat.errors import DataWarning, ModelError
from fedstat.federation.design import Design, Missing, agree_design
from fedstat.federation.engine import Engine, LocalEngine
from fedstat.federation.formula import Formula, parse_formula
from fedstat.federation.ledger import Ledger
from fedstat.federation.partition import ClientPartition


class VerticalModel:
    """A model over institutions that hold different columns.

    Parameters
    ----------
    formula : Formula
    partition : ClientPartition
    missing : {"raise", "drop"}
        What to do with entities that have no response.
    coordinator : str or None
        The institution at which the coordinator sits; by default the one that holds the response.
        ``"apart"`` puts it at no institution.
    """

    family: ClassVar[str]

    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        missing: Missing = "raise",
        coordinator: str | None = None,
    ) -> None:
        if missing not in ("raise", "drop"):
            raise ModelError(f'missing: expected "raise" or "drop", received {missing!r}')
        self.formula = formula
        self.partition = partition
        self.coordinator = coordinator if coordinator is not None else str(formula.response_client)
        if self.coordinator != "apart" and self.coordinator not in partition.sites:
            raise ModelError(
                f"coordinator: expected 'apart' or one of {', '.join(partition.clients)}, "
                f"received {self.coordinator!r}"
            )
        self.engine: Engine = LocalEngine(partition.sites)
        self._session = secrets.token_hex(8)
        self._agreement = self.new_ledger()
        self.design: Design = self.engine.run(
            agree_design(
                formula,
                partition.rows,
                partition.n_entities,
                self._session,
                missing=missing,
                partial=partition.partial,
                min_count=partition.min_count,
            ),
            self._agreement,
        )
        self._warn_of_partial_blocks()

    @classmethod
    def from_formula(
        cls,
        formula: str,
        partition: ClientPartition,
        *,
        missing: Missing = "raise",
        coordinator: str | None = None,
    ) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            ``response ~ terms``; ``.`` is every other column of every client. Allowed are ``+ - : * ^``,
            ``C()``, ``log``, ``exp``, ``sqrt``, ``scale``, ``center``, ``bs``, ``poly`` and ``Q()``.
        partition : ClientPartition
            In the vertical layout.
        missing : {"raise", "drop"}
            Whether entities without a response are an error or are left out and counted.
        coordinator : str, optional
            The institution at which the coordinator sits: by default the one that holds the response.
            ``"apart"`` puts it at none of them.

        Raises
        ------
        FormulaError
            The formula holds something that is not allowed, an unknown column, or a term that needs
            columns of two clients.
        DesignError
            The columns that it names cannot enter a model; see the message.
        """
        if not isinstance(partition, ClientPartition):
            raise ModelError(
                f"partition: expected a fedstat.ClientPartition, received {type(partition).__name__}; "
                "make one with ClientPartition.from_frames({client: table}, on=key)"
            )
        if partition.layout != "vertical":
            raise ModelError(
                f"{cls.__name__} needs a vertical partition (clients hold different columns); "
                "this one is horizontal (clients hold different rows)"
            )
        parsed = parse_formula(formula, partition.columns)
        return cls(parsed, partition, missing=missing, coordinator=coordinator)

    def new_ledger(self) -> Ledger:
        """Start an account for one run."""
        return Ledger(at=None if self.coordinator == "apart" else self.coordinator)

    def _warn_of_partial_blocks(self) -> None:
        if self.partition.partial != "drop":
            return
        counts = [f"{b.n_partial:,} at '{b.client}'" for b in self.design.blocks if b.n_partial]
        if counts:
            warnings.warn(
                f"entities with only some of a client's columns were taken as missing there: "
                f"{', '.join(counts)}. ClientPartition(partial='mean' or 'error') are the alternatives.",
                DataWarning,
                stacklevel=5,
            )
