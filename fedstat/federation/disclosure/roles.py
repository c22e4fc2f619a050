"""Studies and roles: which coordinator speaks for a study, and who may request what in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from fedstat.errors import ConsentError, PartitionError
from fedstat.federation.crypto.keys import normalize_fingerprint
from fedstat.federation.message import Purpose

# ----------------------------------------------------------------------------------------------------
# Several studies at one site: each has a coordinator, whose key signs its requests. All of them are answered
# by one site, with one release history and one privacy budget.
#
# A study is bound to a key, so no other coordinator can use its name. A person is a statement of the
# coordinator: the site compares it with its roles, but only the coordinator can know who sits at its
# keyboard.

AGREEING_FAMILIES = frozenset({"design", "secure", "align", "approval", "schema", "receipt"})
"""Families that agree on columns, keys and plans. Every analysis needs them, so roles do not list them."""


@dataclass(frozen=True, slots=True)
class Study:
    """A study at a site: the fingerprint of its coordinator's key, and its folder for requests and replies.

    Empty texts mean those of the site. `roster` has the digests of its accepted rosters, by number.
    """

    coordinator: str = ""
    exchange: str = ""
    roster: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Role:
    """What some people may request; an empty entry allows everything that the policy allows.

    Parameters
    ----------
    people, studies : tuple of str
        Persons and studies, as the coordinator states them.
    families : tuple of str
        Families of models, as in ``families`` of the policy.
    columns : tuple of str
        Columns of the site that a formula may use.
    """

    people: tuple[str, ...] = ()
    studies: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def admits(self, purpose: Purpose, family: str) -> bool:
        """Return whether this person may send requests of this family in this study."""
        return (
            (not self.people or purpose.person in self.people)
            and (not self.studies or purpose.study in self.studies)
            and (not self.families or family in (*self.families, *AGREEING_FAMILIES))
        )


@dataclass(frozen=True, slots=True)
class AdmittedRoles:
    """The roles under which a request may be answered, by name; without any role all columns are admitted."""

    site: str
    roles: Mapping[str, Role]
    is_limited: bool = False
    label: str = ""
    """Column that refers to the site itself, which is not one of its data."""

    def name(self, columns: Collection[str]) -> str:
        """Return the first role that has all of these columns; empty without roles."""
        columns = set(columns) - {self.label}
        return next((name for name, role in self.roles.items() if self._has(role, columns)), "")

    def check_columns(self, columns: Collection[str]) -> None:
        """Require a role that has all of these columns, with a ConsentError."""
        columns = set(columns) - {self.label}
        if self.is_limited and not self.name(columns):
            held = {name for role in self.roles.values() for name in role.columns}
            outside = sorted(columns - held) or sorted(columns)
            raise _refusal(
                "roles",
                self.site,
                f"does not let this person use {', '.join(outside)} in this study. Leave the column out, or "
                "ask the owner to add it to a role in site.toml",
            )

    @staticmethod
    def _has(role: Role, columns: Collection[str]) -> bool:
        return not role.columns or set(columns) <= set(role.columns)


def _refusal(rule: str, site: str, why: str) -> ConsentError:
    """Return the error of a site whose ``site.toml`` does not admit a request."""
    return ConsentError(f"{site}: its site.toml ({rule}) {why}", rule=rule, site=site)


def admit(
    site: str,
    studies: Mapping[str, str],
    roles: Mapping[str, Role],
    client: str,
    purpose: Purpose,
    family: str,
) -> AdmittedRoles:
    """Return the roles under which a request may be answered.

    `studies` has the fingerprint of each study's coordinator. A coordinator with studies must name one of its
    own, and no other coordinator can name it.

    Raises
    ------
    ConsentError
        The study belongs to another coordinator, or no role admits the request.
    """
    key = normalize_fingerprint(client)
    own = [name for name, one in studies.items() if normalize_fingerprint(one) == key]
    if (own or purpose.study in studies) and purpose.study not in own:
        raise _refusal(
            "studies",
            site,
            f"has no study '{purpose.study}' of this coordinator. Connect with study= and the name that the "
            "owner has given to the study in site.toml",
        )
    found = {name: role for name, role in roles.items() if role.admits(purpose, family)}
    if roles and not found:
        who = f"'{purpose.person}'" if purpose.person else "a person without a name"
        raise _refusal(
            "roles",
            site,
            f"has no role that lets {who} send requests of family '{family}' in study '{purpose.study}'. "
            "Connect with person= and study=, or ask the owner for a role in site.toml",
        )
    return AdmittedRoles(site, found, bool(roles))


def role_problems(
    studies: Collection[str], roles: Mapping[str, Role], families: Collection[str]
) -> Iterator[str]:
    """Yield a line for each role that names a study or a family that the site does not have."""
    for name, role in roles.items():
        if studies and (unknown := sorted(set(role.studies) - set(studies))):
            yield f"[roles.{name}] names the studies {', '.join(unknown)}, which [studies] does not have"
        if unknown := sorted(set(role.families) - set(families)):
            yield f"[roles.{name}] names the families {', '.join(unknown)}, which are not installed"


def check_study_names(names: Collection[str]) -> None:
    """Require names that a coordinator can state, with a PartitionError."""
    for name in names:
        if not name or (problem := Purpose(study=name).problem()):
            raise PartitionError(f"[studies]: a name is not valid: {problem or 'it is empty'}")
