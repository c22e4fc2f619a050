"""Counts and notes on values that masks and secure products do not protect.

The coordinator learns the sum of the linear predictors over institutions, entity by entity, and tells it to
the response holder. Who has a record is agreed, so that at an entity of which one institution alone has a
record the sum *is* that institution's part; a receiver with a block of its own subtracts its own part first.

Where two institutions or more add up, no round gives any of them away. Many rounds together tell more: a
round changes the sum by X P X' z, with the blocks of all institutions side by side in X and residuals z that
the receiver knows, so that after about as many rounds as there are columns their joint column space shows,
and with it approximate inner products between entities. Fewer rounds tell less; exchange="moments" has no
value per entity.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import TWO_SITES, hides
from fedstat.inference.summary import Note
from fedstat.models.vertical.exchange.notes import MANTISSA_BITS, rounds_of_predictors, solvable_note
from fedstat.models.vertical.layout import Layout
from fedstat.models.vfem.covariance.information import PsiCovariance
from fedstat.typing import Floats

MOMENTS = "exchange='moments' has no value per entity. "


def count_exposed(layout: Layout, at: str | None) -> dict[str, int]:
    """Entities at which a masked sum is one site's own part; the coordinator sits `at`.

    Those of which the site has a record, and no other site but one that receives the sum: the
    coordinator and the response holder do.
    """
    seen = np.zeros((layout.n, len(layout.clients)), dtype=bool)
    for j, client in enumerate(layout.clients):  # filled-in means are zero in the sum
        seen[layout.kept[client], j] = True
    exposed = np.zeros_like(seen)
    for receiver in (at, layout.active):
        hidden = seen & np.array([client != receiver for client in layout.clients])
        exposed |= hidden & (hidden.sum(axis=1) == 1)[:, None]
    return dict(zip(layout.clients, exposed.sum(axis=0).tolist(), strict=True))


RESPONSE_RELEASED = (
    "Nobody could deal random numbers: every institution learns the response of each of its entities from "
    "the first message, since at coefficients of zero a residual is the response less its mean. With a third "
    "institution, or coordinator='apart', residuals stay with the response holder."
)


def response_notes(layout: Layout, ledger: Ledger) -> Iterator[Note]:
    """Say what institutions learned of a response that is not normal, in bits."""
    others = [k for k in layout.clients if k != layout.active]
    if any(one.array == "z" and one.step == "glm_score" for one in ledger.entries):
        yield Note("response_released", RESPONSE_RELEASED, "warning")
        return
    if not others:
        return
    told = [one for one in ledger.entries if one.array == "shown" and one.receiver in others]
    widths, parts = dict(zip(layout.clients, layout.sizes, strict=True)), []
    for k in others:
        numbers = sum(one.receiver == k for one in told) * (1 + widths[k])
        parts.append(
            f"{k} {numbers:,} ({MANTISSA_BITS * numbers:,} bits) of {len(layout.kept[k]):,} entities"
        )
    yield Note(
        "residual_sums",
        "Residuals stayed with the response holder. Each institution learned sums of its own columns with "
        f"them, sealed from the coordinator: {', '.join(parts)}. A binary response is one bit an entity: "
        "these sums narrow the responses down, and in a small group whoever solves them has these.",
    )
    yield from small_patterns(layout.counts, ledger, layout.active)
    if not any(one.array == "h" and one.step == "glm_information" for one in ledger.entries):
        return
    opened = [one.receiver for one in ledger.entries if (one.step, one.array) == ("open_columns", "only")]
    seen = ~layout.missing
    summed = seen[:, [opened.count(k) > 1 or k not in others for k in layout.clients]].any(axis=1)
    told_each = layout.missing.any(axis=1) & seen.any(axis=1) & ~(summed & (seen.sum(axis=1) == 1))
    if told_each.any():
        yield Note(
            "curvature",
            "For standard errors the coordinator, and the institutions that have them, were told a curvature "
            f"of {int(layout.counts[told_each].sum()):,} entities that two institutions or more have and "
            "another lacks, or that one has and too few more to add up. It tells the response to who knows "
            "the linear predictor, as the coordinator does; cov_type='none' sends none.",
        )


def small_patterns(counts: Floats, ledger: Ledger, holder: str) -> Iterator[Note]:
    """Say in which patterns, of so many entities (G,), a coordinator apart could solve for responses.

    At linear predictors that it knows every sum over a pattern is linear in each binary response.
    """
    told = sum(
        int(one.shape[-1])
        for one in ledger.entries
        if (one.sender, one.array) == (holder, "sums") and one.step in ("glm_evaluate", "joint_weights")
    )
    entities = int(counts[counts <= told].sum())
    if entities and ledger.at != holder:
        yield Note(
            "small_patterns",
            f"The coordinator learned {told} sums of derivatives by missing pattern, at linear predictors "
            f"that it knows. {entities:,} entities are in patterns of no more than that: their responses, if "
            "these are binary, are as good as told to it.",
            "warning",
        )


def masked_notes(layout: Layout, ledger: Ledger, remedy: str, normal: bool = True) -> Iterator[Note]:
    """Say what masked iterations disclose to the coordinator, and what to do where that is much."""
    at = ledger.at
    if len(layout.clients) == 1:
        yield Note(
            "one_institution",
            "One institution has columns: nothing is added up, and its linear predictors were not masked.",
        )
        return
    receivers = "the coordinator" if at == layout.active else "the coordinator and the response holder"
    residuals = ", and every institution the residuals of its entities" if normal else ""
    yield Note(
        "masked",
        "Linear predictors were added up over institutions, among parties that follow the protocol "
        f"(semi-honest): {receivers} learned the sum for every entity in every round{residuals}. "
        f"{remedy}See .ledger.releases().",
    )
    others = [k for k in layout.clients if k != layout.active]
    yield from solvable_note(rounds_of_predictors(ledger, others), layout.p, ledger, others)
    if at != layout.active and normal:
        yield Note(
            "response_known",
            "Residuals and sums together give the coordinator the response of every entity.",
            "warning",
        )
    parts = [
        f"{count:,} of {len(layout.kept[k]):,} at {k}"
        for k, count in count_exposed(layout, at).items()
        if count
    ]
    if parts:
        yield Note(
            "exposed",
            "Masks hide nothing where one institution alone, beside a receiver of the sum, has a record: the "
            f"sum is then its own linear predictor. Entities so exposed: {', '.join(parts)}.",
            "warning",
        )
    if not hides(len(layout.clients)):
        yield Note("two_sites", TWO_SITES, "warning")


def secure_product_notes(covariance: PsiCovariance) -> Iterator[Note]:
    """Say where exact cross-products came from, and which were left out."""
    if covariance.how != "secure":
        return
    yield Note(
        "secure_products",
        "Cross-products between institutions come from secure multiplication among parties that follow the "
        f"protocol (semi-honest): nobody saw another's columns. Who deals the random numbers for two "
        f"institutions ({covariance.dealers}) must not collude with either; the coordinator and one "
        "institution together learn the other's products with that one's columns.",
    )
    if covariance.left_out:
        yield Note(
            "products_left_out",
            f"{covariance.left_out} of the products between two institutions would rest on too few common "
            "entities and were not asked for; they count as zero, their expectation.",
        )
