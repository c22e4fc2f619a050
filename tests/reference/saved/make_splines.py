"""Saved results of splines whose columns were counted from one, by the version before they were from zero."""

import warnings

import numpy as np
import pandas as pd

import fedstat as fs

SPLINE = "bs(x, knots=(0,), lower_bound=-4, upper_bound=4)"


def draw():
    """Rows of the fits."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": rng.normal(size=90), "z": rng.normal(size=90)})
    return frame.assign(y=np.sin(frame["x"]) + frame["z"] + rng.normal(size=90))


def fits():
    """One fit over rows, one over columns."""
    frame = draw()
    rows = fs.ClientPartition.from_frame(frame.assign(site=["A", "B"] * 45), by="site")
    frame["k"] = range(90)
    columns = fs.ClientPartition.from_frames({"A": frame[["k", "y", "x"]], "B": frame[["k", "z"]]}, on="k")
    return {
        "glm": fs.FederatedGLM.from_formula(f"y ~ {SPLINE} + z", rows).fit(local=False),
        "vfem": fs.VFEMRegression.from_formula(f"y ~ {SPLINE} + z", columns).fit(),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for family, fit in fits().items():
        fit.save(f"{family}_spline.fed")
