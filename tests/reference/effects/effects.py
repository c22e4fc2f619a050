"""Write the rows of the references, and predictions of Python's marginaleffects (0.6) for them.

``python tests/reference/effects/effects.py tests/reference/effects``, with statsmodels and marginaleffects.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd


def rows():
    """Return rows with two categories, a number, and three responses."""
    random = np.random.default_rng(49)
    n = 360
    t = pd.DataFrame({"s": np.tile(list("ABC"), n // 3), "x": random.normal(1, 2, n).round(3)})
    t["g"], t["h"] = random.choice(["a", "b", "c"], n), random.choice(["u", "v"], n, p=[0.3, 0.7])
    eta = 0.3 * t["x"] + 0.8 * (t["g"] == "b") - 0.6 * (t["g"] == "c") * (t["h"] == "v")
    t["e"] = (random.random(n) < 1 / (1 + np.exp(-eta))).astype(int)
    t["y"] = (2 + eta + random.normal(size=n)).round(4)
    t["k"] = random.poisson(np.exp(0.5 * eta))
    return t


def main(folder):
    """Write all files."""
    import marginaleffects as me
    import statsmodels.formula.api as smf

    table = rows()
    table.to_csv(folder / "rows.csv", index=False)
    table[["g", "h"]] = table[["g", "h"]].astype("category")
    logit = smf.logit("e ~ x * h + I(x ** 2) + g", table).fit(disp=0)
    poisson = smf.poisson("k ~ x * g + h", table).fit(disp=0)
    kept = ["term", "contrast", "g", "h", "estimate", "std_error", "conf_low", "conf_high"]
    for model, fit in {"logit": logit, "poisson": poisson}.items():
        found = {
            "predictions": me.avg_predictions(fit),
            "predictions_by": me.avg_predictions(fit, by="g"),
            "counterfactual": me.avg_predictions(fit, variables="g", by="g"),
            # Steps of a number are centered there; ours begin at the value of the row, as R's.
            "comparisons": me.avg_comparisons(fit, variables=["g", "h"]),
            "values": me.avg_comparisons(fit, variables={"x": [0, 2]}, by="g"),
            "lnratio": me.avg_comparisons(fit, variables="g", comparison="lnratioavg"),
            "slopes": me.avg_slopes(fit, variables="x"),
            "slopes_by": me.avg_slopes(fit, variables="x", by="h"),
        }
        for name, one in found.items():
            frame = one.to_pandas() if hasattr(one, "to_pandas") else one.data.to_pandas()
            frame = frame[[column for column in kept if column in frame]]
            frame.to_csv(folder / f"{model}_{name}.csv", index=False, float_format="%.12g")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
