"""Order of the steps in the exchanges of VerticalGLM: which stand directly before which."""

from __future__ import annotations

from collections.abc import Mapping

from fedstat.models.vertical.exchange.steps import EXCHANGE_ORDER

ORDER: Mapping[str, str] = {
    **EXCHANGE_ORDER,
    "sum_with_response": "stage_response sum_products",
    "open_product": "deal_product open_product stage_block stage_response sum_products sum_response "
    "sum_with_response weigh",
    # Newton steps
    "linear_predictor": "admm_coefficients linear_predictor respond respond_openly share_product stage_block "
    "stage_response sum_scores sum_with_response weigh",
    "respond": "deal_product linear_predictor respond respond_by_fold share_product sum_with_response",
    "respond_openly": "admm_respond admm_start deal_product linear_predictor respond_by_fold respond_openly "
    "share_product stage_response",
    "respond_by_fold": "deal_product linear_predictor respond respond_by_fold respond_openly share_product "
    "sum_scores",
    "sum_scores": "linear_predictor respond respond_by_fold respond_openly share_product sum_scores",
    "weigh": "share_product sum_scores weigh",
    # new entities
    "project_block": "predict_block",
    # ADMM
    "admm_start": "respond_openly stage_block",
    "admm_largest": "admm_move admm_start respond_openly",
    "admm_set": "admm_adapt admm_certify admm_coefficients admm_largest admm_start",
    "admm_move": "admm_move admm_respond admm_set",
    "admm_respond": "admm_move admm_respond admm_set respond_openly",
    "admm_adapt": "admm_move admm_respond",
    "admm_certify": "admm_move respond_openly",
    "admm_coefficients": "admm_certify",
}
"""Steps by what may come directly before them at a site."""
