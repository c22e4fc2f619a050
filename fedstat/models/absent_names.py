"""What to use instead of attributes of statsmodels' GLMResults that results with coefficients do not have."""

from __future__ import annotations

from collections.abc import Mapping

PER_ROW = (
    "residuals and fitted means are row-level values, which stay at the sites; use evaluate(partition), or "
    "predict(...) for rows that you have"
)
INFLUENCE = "influence is a row-level value, which stays at the sites"
PICTURE = "it draws rows, which stay at the sites; use plot_coefficients(), or effect() if there is one"
OF_ONE_FAMILY = (
    "this model does not define it; FederatedGLM has it. Use llf, aic and bic, or evaluate(partition)"
)
FIRST_FIT = "the optimizer's state is not kept; use converged, and trace where a family has it"
OTHER_COVARIANCE = "use cov_params(), or with_covariance(...), where a family has it, for another one"
ABSENT: Mapping[str, str] = {
    "bic_deviance": "use bic, which statsmodels calls bic_llf",
    "bic_llf": "use bic",
    "coef_": "use params",
    "confint": "use conf_int()",
    "cov_kwds": "use cov_type",
    "deviance": OF_ONE_FAMILY,
    "family": "this model has one distribution of the response; see model_name",
    "fit_history": FIRST_FIT,
    "fittedvalues": PER_ROW,
    "get_distribution": "use predict(...) for the mean and scale for the dispersion",
    "get_hat_matrix_diag": INFLUENCE,
    "get_robustcov_results": OTHER_COVARIANCE,
    "get_influence": INFLUENCE,
    "info_criteria": "use aic and bic",
    "initialize": "make a new model with from_formula(...)",
    "k_constant": "it is 1 with an intercept; df_resid counts it",
    "llf_scaled": "use llf",
    "llnull": OF_ONE_FAMILY,
    "load": "use fs.load(path)",
    "method": "use method_name",
    "mle_settings": FIRST_FIT,
    "mu": PER_ROW,
    "normalized_cov_params": "use cov_params() / scale",
    "null": OF_ONE_FAMILY,
    "null_deviance": OF_ONE_FAMILY,
    "pearson_chi2": OF_ONE_FAMILY,
    "plot_added_variable": PICTURE,
    "plot_ceres_residuals": PICTURE,
    "plot_partial_residuals": PICTURE,
    "pvalue": "use pvalues",
    "pseudo_rsquared": "use rsquared, or compare_lr_test(...) with a smaller fit",
    "remove_data": "results hold no rows; save(path) writes all of them",
    "resid": PER_ROW,
    "resid_anscombe": PER_ROW,
    "resid_anscombe_scaled": PER_ROW,
    "resid_anscombe_unscaled": PER_ROW,
    "resid_deviance": PER_ROW,
    "resid_pearson": PER_ROW,
    "resid_response": PER_ROW,
    "resid_working": PER_ROW,
    "score_test": "use wald_test(...), or compare_lr_test(...) with a smaller fit",
    "summary2": "use summary(), or tidy() and glance() for tables",
    "summary_col": "use fs.compare({...})",
    "vcov": OTHER_COVARIANCE,
}
"""By name: what to use instead. A family that defines the name answers with its own."""
