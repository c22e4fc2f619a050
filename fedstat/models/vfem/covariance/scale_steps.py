"""Information on the alpha of a negative binomial response, beside that on the other parameters.

In log alpha, r: the response holder has -L_mr, -L_vr and -L_rr, and every institution learns the sums of its
columns with -L_mr, sealed; where nobody can deal, -L_mr is sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from fedstat.errors import MessageError
from fedstat.federation.door.state import SiteData, State
from fedstat.federation.message import Declared, Step, check_lengths
from fedstat.federation.rounds.running_steps import SHOWN, open_sums
from fedstat.kernels.glm.count_quadrature import BY_MR, BY_RR, BY_VR
from fedstat.kernels.rows import column_sums
from fedstat.models.vfem.blocks.declare import aggregate
from fedstat.models.vfem.blocks.request import BLOCK
from fedstat.models.vfem.blocks.response import GLMResponse
from fedstat.models.vfem.iteration.glm_response_steps import (
    CURVATURES,
    SEALED_SUMS,
    glm_response_of,
    seal_all,
    seal_of,
)
from fedstat.models.vfem.iteration.glm_steps import glm_client
from fedstat.typing import Array, Floats


def count_response(data: SiteData, state: State) -> GLMResponse:
    """Return the response, which has to be negative binomial."""
    response = glm_response_of(state)
    if response.spec.alpha is None:
        raise MessageError(f"{data.name}: the response of this fit has no alpha")
    return response


def glm_scale_curvature(
    data: SiteData, state: State, text: str, patterns: Array
) -> tuple[dict[str, Array], str]:
    """Release ``sums`` (G, 3) of -L_mr, -L_vr and -L_rr by pattern, and seal what shows sites their sums.

    `text` lists these; where it lists none ``cross``, -L_mr of every entity, is released.
    """
    response, clients = count_response(data, state), json.loads(text)
    if int(response.code.max()) >= int(patterns):
        raise MessageError(f"{data.name}: expected the number of missing patterns")
    sums = response.by_pattern(-response.terms[[BY_MR, BY_VR, BY_RR]], int(patterns))
    cross = -response.terms[BY_MR]
    if not clients:
        return {"sums": sums, "cross": cross}, ""
    return {"sums": sums} | seal_all(seal_of(data, state, BLOCK, k, cross) for k in clients), ""


def glm_scale_information(
    data: SiteData, state: State, shown: Array | None = None, cross: Floats | None = None
) -> dict[str, Array]:
    """Release the sums of the columns, less their means, with -L_mr of the institution's entities: (p,)."""
    client = glm_client(state)
    block, mu = client.block, client.accepted.mu
    if shown is not None:
        sums = open_sums(state, BLOCK, shown)
        return {"by_scale": (sums[1:] - sums[0] * mu) * block.scale}
    if cross is None:
        cross = -count_response(data, state).terms[BY_MR][block.rows]
    check_lengths(data.name, cross=(cross, block.n_seen))
    state.tell(block.weights(cross, "weights"))
    return {"by_scale": column_sums(block.X - mu, cross) * block.scale}


CROSS = Declared("per entity", "mixed derivative of the log-likelihood", optional=True)
STEPS: Mapping[str, Step] = {
    "glm_scale_curvature": Step(
        glm_scale_curvature,
        {"patterns": Declared("control", "number of missing patterns", 0)},
        {"sums": CURVATURES, "cross": CROSS, **SEALED_SUMS},
        text_in=Declared("control", "which institutions learn sums"),
    ),
    "glm_scale_information": Step(
        glm_scale_information,
        {"shown": replace(SHOWN, optional=True), "cross": replace(CROSS, weighs="weights")},
        # Where the weights are sealed, the response holder has judged them.
        {"by_scale": aggregate("weighted sums of the columns")},
    ),
}
