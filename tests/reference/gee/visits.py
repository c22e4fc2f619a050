"""Simulated visits of patients in three hospitals: two to five for each, some without a measurement."""

import numpy as np
import pandas as pd


def visits(patients=240, seed=5):
    """Rows in the order of visits, so that the first rows are the patients, one after the other."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 6, patients)
    patient = np.repeat(np.arange(patients), sizes)
    n = len(patient)
    person = rng.normal(size=patients)[patient]
    frame = pd.DataFrame(
        {
            "patient": patient,
            "visit": np.concatenate([np.arange(size) for size in sizes]),
            "hospital": np.array(["Bonn", "Kiel", "Ulm"])[patient % 3],
            "arm": np.where(patient % 2, "new", "old"),
            "dose": rng.normal(size=n).round(3),
            "shift": rng.uniform(0.0, 0.3, n).round(3),
            "weight": rng.integers(1, 4, patients)[patient] * 1.0,
            "visit_weight": rng.uniform(0.5, 2.0, n).round(3),
        }
    )
    eta = 0.4 * frame["dose"] + 0.3 * (frame["arm"] == "new") + 0.1 * frame["visit"]
    frame["score"] = (1.0 + eta + person + rng.normal(size=n)).round(3)
    frame["ill"] = (rng.random(n) < 1.0 / (1.0 + np.exp(-(eta + person)))).astype(int)
    frame["falls"] = rng.poisson(np.exp(0.3 + eta / 2.0 + 0.4 * person))
    return frame.sort_values(["visit", "patient"], ignore_index=True)


if __name__ == "__main__":
    visits().to_csv("visits.csv", index=False)
