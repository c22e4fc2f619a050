"""Model families: one folder and one entry in INSTALLED for each.

The package imports their classes from here, sites answer their steps, and saved results of all can be read.
"""

INSTALLED: dict[str, tuple[str, ...]] = {
    "horizontal": (),
    "fedavg": ("FedAvg", "FedAvgM", "FedProx", "QFedAvg"),
    "boost": ("FedFunctionBoost", "PublicCurve"),
    "glm": ("FederatedGLM", "FederatedOLS", "GLORE"),
    "gee": ("FederatedGEE",),
    "cox": ("FederatedCox",),
    "aft": ("FederatedAFT",),
    "treatment": ("TreatmentEffect",),
    "survival_effect": ("SurvivalEffect",),
    "descriptive": (
        "CumulativeIncidence",
        "KaplanMeier",
        "corr",
        "crosstab",
        "explain_table",
        "histogram",
        "quantiles",
        "table_one",
    ),
    "categories": ("FederatedMultinomial", "FederatedOrdinal"),
    "mixed": ("FederatedMixed",),
    "vfem": ("VFEMRegression", "VFEMGLM", "Iteration"),
    "vglm": ("VerticalGLM",),
    "laser": ("LASER",),
    "copula": ("CopulaSynthesizer", "Bounds", "asinh", "levels", "log"),
    "copula_glm": ("PrivateCopulaGLM",),
    "m2sem": ("M2SEM",),
    "impute": ("explain_impute", "impute"),
}
"""Folders that add steps to ``fedstat.federation.disclosure.site.FAMILIES``, and their public classes.

What families share has steps and no class.
"""
