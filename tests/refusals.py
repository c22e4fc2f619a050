"""Requirements on refusals whose reason only the owner of the site reads."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from fedstat.errors import PolicyError
from fedstat.federation.disclosure.refusals import ROWS, RefusalLog


@contextmanager
def refused_for(*rules, site=""):
    """Require a refusal by one of the rules, and of a site if one is named.

    Where the site keeps reasons in its log, the analyst reads one word and the log has the rule.
    """
    reasons, note = [], RefusalLog.note

    def keep(log, reason):
        reasons.append(reason)
        note(log, reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RefusalLog, "note", keep)
        with pytest.raises(PolicyError) as caught:
            yield caught
    error = caught.value
    logged = error.rule == ROWS
    text = reasons[-1] if logged else str(error)
    assert error.site.startswith(site) and any(f"({rule})" in text for rule in rules)
    assert not logged or not any(f"({rule})" in str(error) for rule in rules)
