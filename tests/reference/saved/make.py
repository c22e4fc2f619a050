"""Saves results with the version that is installed: the former one, refused by name."""

import warnings

import numpy as np
import pandas as pd

import fedstat as fs

warnings.simplefilter("ignore")
rng = np.random.default_rng(1)
frame = pd.DataFrame({"x": rng.normal(size=60), "site": "A"})
frame["y"] = frame["x"] + rng.normal(size=60)
partition = fs.ClientPartition.from_frame(frame, by="site")
result = fs.FederatedGLM.from_formula("y ~ x", partition).fit(local=False)
result.save("glm_2.fed")
