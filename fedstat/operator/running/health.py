"""Whether a site is served and can answer, in one line for monitors."""

from __future__ import annotations

from pathlib import Path

from fedstat.errors import FedstatError
from fedstat.federation.carry.room import full_disk
from fedstat.federation.carry.site_folder import mode_problems, read_site_policy
from fedstat.operator.running.standing import Standing


def ailing(standing: Standing, folder: Path, age: float | None, patience: float) -> str:
    """Say why a site, whose service was seen `age` seconds ago, cannot answer; empty where it can."""
    if not standing.is_served:
        return f"is not served ({standing.state})"
    if age is None or age > patience:
        seen = "never seen" if age is None else f"seen {age:.0f} s ago"
        return f"its service was {seen}, and one question may take {patience:g} s: it hangs"
    if full := full_disk(folder):
        return full
    try:
        read_site_policy(folder)
    except FedstatError as error:
        return f"its policy cannot be read: {error}"
    for problem in mode_problems(folder):
        return problem
    if standing.account != "whole":
        return standing.account
    if standing.connected is False:
        return "it has no connection to the server"
    if standing.certificate_days is not None and standing.certificate_days < 0:
        return "its certificate has expired"
    return standing.problem
