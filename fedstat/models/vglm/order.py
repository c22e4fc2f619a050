"""Which steps stand directly before which, in the exchanges of VerticalGLM."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.models.vertical.exchange.steps import EXCHANGE_ORDER

ORDER: Mapping[str, str] = {
    **EXCHANGE_ORDER,
    "open_product": "deal_product open_product sum_products sum_response weigh",
    # Newton steps
    "linear_predictor": "admm_coefficients linear_predictor respond share_product stage_block stage_response "
    "sum_scores",
    "respond": "admm_respond admm_start linear_predictor respond stage_response",
    "sum_scores": "linear_predictor respond share_product sum_scores",
    "weigh": "share_product sum_scores",
    # ADMM
    "admm_start": "respond stage_block",
    "admm_largest": "admm_move admm_start respond",
    "admm_set": "admm_adapt admm_certify admm_coefficients admm_largest admm_start",
    "admm_move": "admm_move admm_respond admm_set",
    "admm_respond": "admm_move admm_set",
    "admm_adapt": "admm_move admm_respond",
    "admm_certify": "admm_move respond",
    "admm_coefficients": "admm_certify",
}
