"""A model of sites with different columns: formula, partition, agreed design, engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import numpy as np

from fedstat.docstrings import inherits_signature
from fedstat.errors import DataWarning, ModelError, warn
from fedstat.federation.audit.ledger import CoordinatorLog
from fedstat.federation.design.formula.parse import Formula, parse_formula
from fedstat.federation.design.vertical_design import Design, MissingRule, agree_design
from fedstat.federation.disclosure.approval import DESIGN_FAMILY, PlannedStep
from fedstat.federation.disclosure.policy import Policy
from fedstat.federation.dry_run.execution import DrySite
from fedstat.federation.dry_run.expected_releases import plan_text_release
from fedstat.federation.dry_run.synthetic import synthetic_column_sites
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import Engine, FitProtocol
from fedstat.federation.protocols.secure_products import least_rows
from fedstat.models.checks import check_layout, checks_arguments, takes_parsed
from fedstat.models.explain import DryRunPlan, Explainable
from fedstat.models.vertical.layout import Layout, list_terms, values_of_parts

ROLE_ARGUMENTS = ("offset", "freq_weights", "var_weights")
"""Arguments that name additional columns of the response's site, which ``.`` does not include."""


class VerticalModel(Explainable):
    """A model over sites that hold different columns.

    Entities without a response are an error, or with `missing` "drop" left out; some families have further
    choices. `coordinator` is the site of the coordinator, or ``"apart"``; :meth:`from_formula` documents the
    default.

    Attributes
    ----------
    formula, partition, coordinator
        As in :meth:`from_formula`.
    engine : Engine
        Engine that sends requests to the sites; that of the partition.
    design : Design
        Blocks of columns, by site, and the entities that each has.
    family : str
        Steps that the model requests from sites.
    distribution : DistributionSpec
        Family and link of the response, by name.
    between : {"independent", "free"}
        Whether columns of two sites may be correlated, for models with this choice.
    layout : Layout
        Sites, columns and entities of fits, for models that lay them out at construction.

    Examples
    --------
    >>> import fedstat as fs
    >>> partition = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    >>> model = fs.VFEMRegression.from_formula("NPGR ~ ROA + CI", partition)
    >>> model.param_names
    ['Intercept', 'ROA', 'CI']
    >>> len(model.design.blocks)
    2
    """

    family: ClassVar[str]
    _conditions: ClassVar[bool] = False
    """Whether fits may use entities that have only some of a site's columns."""
    _roles: Mapping[str, str] = {}
    """Additional columns of the response's site, by the argument that names them."""

    @takes_parsed
    def __init__(
        self,
        formula: Formula,
        partition: ClientPartition,
        *,
        missing: MissingRule | Literal["em"] = "raise",
        coordinator: str | None = None,
    ) -> None:
        if missing == "em" or missing not in ("drop", "raise"):
            raise ModelError(f'missing: expected "drop" or "raise", received {missing!r}')
        self.formula, self._missing = formula, missing
        self.partition = partition
        if coordinator is None:
            coordinator = partition.coordinator or default_coordinator(formula)
        self.coordinator = coordinator
        if self.coordinator != "apart" and self.coordinator not in partition.sites:
            raise ModelError(
                f"coordinator: expected 'apart' or one of {', '.join(partition.sites)}, "
                f"received {self.coordinator!r}"
            )
        self.engine: Engine = partition.engine
        self._session = partition._new_session()
        self._log = CoordinatorLog()
        self._codings: dict[str, str] = {}  # those that sites reported after a fit
        self._agreement = self._new_ledger()
        agreed = self.engine.run(self._agree(missing), self._agreement)
        policies = {name: site.policy for name, site in partition.sites.items()}
        self.design: Design = replace(agreed, least=least_rows(policies))
        if not self._conditions or partition.partial == "drop":
            self._warn_of_partial_blocks(self.__class__.__name__)

    @classmethod
    @checks_arguments
    @inherits_signature(__init__)
    def from_formula(cls, formula: str, partition: ClientPartition, **options: Any) -> Self:
        """Make a model from a formula.

        Parameters
        ----------
        formula : str
            ``response ~ terms``; ``.`` is every other column of every site. Allowed are ``+ - : * / ^``,
            ``C()``, also ``C(x, Sum)``, ``Helmert``, ``Diff`` or ``Poly``, ``log``, ``exp``, ``sqrt``,
            ``scale``, ``center``, ``bs``, ``cr``, ``cc``, ``poly``, ``I(x > 3)`` and ``Q()``.
        partition : ClientPartition
            In the vertical layout.
        missing : {"raise", "drop"}
            Whether entities without a response are an error, which also detects keys that do not match, or
            are left out and counted. VerticalGLM also has "em", for entities that a site lacks.
        coordinator : str, optional
            The site of the coordinator, or ``"apart"`` for none of them. By default it is the site that holds
            the response, and ``"apart"`` if two sites take part, because the secure product of their columns
            needs random numbers from a third party that colludes with neither. For a partition from
            fs.connect, it is that of federation.toml, by default apart.

        Raises
        ------
        FormulaError
            The formula contains something that is not allowed, an unknown column, or a term that needs
            columns of two sites.
        DesignError
            The columns that it names cannot be used; the message states why.

        Examples
        --------
        >>> import fedstat as fs
        >>> data = fs.datasets.make_blocks(200, seed=1)
        >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
        >>> fs.VerticalGLM.from_formula("y ~ .", partition, missing="em").param_names[:3]
        ['Intercept', 'A1', 'A2']
        """
        check_layout(cls.__name__, partition, "vertical")
        extra = [str(options[name]) for name in ROLE_ARGUMENTS if options.get(name) is not None]
        parsed = parse_formula(formula, partition.columns, extra=extra)
        return cls(parsed, partition, **options)

    def _agree(self, missing: MissingRule) -> FitProtocol[Design]:
        """Agree with the sites on columns and entities."""
        return agree_design(
            self.formula,
            self.partition.rows,
            self.partition.n_entities,
            self._session,
            missing=missing,
            partial=self.partition.partial,
            min_count=self.partition.min_count,
            **self._role_columns(),
        )

    def _role_columns(self) -> dict[str, str]:
        """Return the additional columns by their names in the design: "offset", "weights"."""
        return {"offset" if role == "offset" else "weights": name for role, name in self._roles.items()}

    @property
    def param_names(self) -> list[str]:
        """Names of the coefficients, the intercept first, then by site."""
        return ["Intercept", *[name for block in self.design.blocks for name in block.names]]

    def _columns_read(self, site: str) -> Sequence[str]:
        formula = self.formula
        own = (*formula.response_columns, *self._role_columns().values())
        response = own if formula.response_site == site else ()
        read = [column for terms in formula.sites if terms.site == site for column in terms.columns]
        return tuple(dict.fromkeys((*response, *read)))

    def _reported_afterwards(self, site: str) -> Iterator[PlannedStep]:
        if any(terms.site == site for terms in self.formula.sites):
            # A file of results has it, and a prediction begins with it.
            yield plan_text_release(DESIGN_FAMILY, "release_spec")

    def _with_dealer(self, layout: Layout) -> Layout:
        """Let a site of the partition that has no part in the model deal, if there is no other third party.

        For two sites, this is the first other one, in the order of the partition, if an owner does not allow
        the coordinator to deal, or the coordinator is at one of the two. The dealer learns the patterns of
        records, and nothing about a row.
        """
        sites, taking_part = self.partition.sites, {*layout.sites, layout.active}
        wanted = any(sites[name].policy.dealer == "third party" for name in taking_part)
        if len(taking_part) != 2 or not (wanted or self._agreement.at in taking_part):
            return layout
        return replace(layout, bystanders=tuple(name for name in sites if name not in taking_part)[:1])

    def _invent_sites(self, plan: DryRunPlan, policies: Mapping[str, Policy]) -> Mapping[str, DrySite]:
        rows, session = self.partition.rows, self._session
        n, opened = len(self.design.response_keep), self._role_columns()
        values = {"weights": np.ones(n), "offset": np.zeros(n)}
        kept = {f"response {name}": value for name, value in values.items() if name in opened}
        holder = {self.design.active: kept}
        return synthetic_column_sites(self.design, rows, policies, self.distribution, session, holder)

    def _warn_of_partial_blocks(self, which: str) -> None:
        """Warn of entities with some of a site's columns, which count as missing there in a fit."""
        if self.partition.partial not in ("condition", "drop"):
            return
        counts = [f"{b.n_partial:,} at '{b.site}'" for b in self.design.blocks if b.n_partial]
        if not counts:
            return
        reported = f"entities with only some of a site's columns count as missing there: {', '.join(counts)}."
        if self.partition.partial == "condition":
            lacking, lost = (list_terms(values_of_parts(self.design.blocks, has)) for has in (False, True))
            reported += (
                f" They lack values of {lacking}. {which} does not condition on a part of a block; unused "
                f"observed values: {lost}."
            )
        warn(
            f"{reported} The argument partial of a partition has the alternatives 'mean' and 'error'.",
            DataWarning,
        )


def read_roles(
    formula: Formula,
    partition: ClientPartition,
    offset: str | None,
    freq_weights: str | None,
    var_weights: str | None,
) -> dict[str, str]:
    """Return the given columns by argument.

    Raises ModelError unless all are at the site of the response, and at most one has weights.
    """
    given = {"offset": offset, "freq_weights": freq_weights, "var_weights": var_weights}
    roles = {role: name for role, name in given.items() if name is not None}
    if {"freq_weights", "var_weights"} <= roles.keys():
        raise ModelError("freq_weights, var_weights: give only one of them; an entity has one weight")
    holder = formula.response_site
    for role, name in roles.items():
        there = [site for site, columns in partition.columns.items() if name in columns]
        if there != [holder]:
            found = f"is at '{there[0]}'" if there else "is at no site"
            raise ModelError(
                f"{role}: column {name!r} {found}; it must be at the site of the response "
                f"'{formula.response}', '{holder}': add it to that site's table"
            )
        if name in formula.response_columns:
            raise ModelError(f"{role}: column {name!r} is the response")
    return roles


def default_coordinator(formula: Formula) -> str:
    """Return the site of the coordinator if the user names none: see :meth:`VerticalModel.from_formula`."""
    holder = str(formula.response_site)
    taking_part = {holder, *[terms.site for terms in formula.sites]}
    # With two sites, neither may deal for the product of their columns, nor a coordinator at either.
    return "apart" if len(taking_part) == 2 else holder
