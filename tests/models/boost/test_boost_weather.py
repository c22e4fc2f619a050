"""Precipitation on temperature and region at 35 Canadian stations, against boosting row by row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from curve_cases import curve_table
from row_boosting import along, boost, both, centered, smooth

import fedstat as fs
from fedstat.kernels.curves import integration_weights, spline_basis

PUBLIC = fs.Policy(max_parameters=10.0, min_count=3, min_level_count=1)
"""Stations are no persons."""
YEAR, DAYS = (0.0, 365.0), np.arange(365) + 0.5


@pytest.fixture(scope="module")
def weather(shared_data):
    folder = shared_data / "canadian_weather"
    if not folder.is_dir():
        pytest.skip("the weather of Canada is absent")
    temp, rain = (pd.read_csv(folder / f"{name}.csv.gz") for name in ("Temperature_C", "log10precip"))
    assert (temp["place"] == rain["place"]).all()
    T, R = (table.filter(regex=r"^d\d+$").to_numpy() for table in (temp, rain))
    frame = curve_table(temp=T - T.mean(axis=0), rain=R)
    return frame.assign(region=temp["region"], service=[f"service {i % 3}" for i in range(len(temp))])


def model_of(frame, text, **settings):
    curves = {name: fs.Curve(f"{name}_*", grid=DAYS, domain=YEAR, unit="day") for name in ("temp", "rain")}
    partition = fs.ClientPartition.from_frame(frame, by="service", curves=curves, policy=PUBLIC, min_count=3)
    return fs.FedFunctionBoost.from_formula(text, partition, time="bbs(t, knots=6, df=5)", **settings)


def test_the_path_over_three_services_is_that_of_all_stations_row_by_row(weather):
    b, s = spline_basis(DAYS, *YEAR, 6), spline_basis(DAYS, *YEAR, 5)
    temp, rain = weather.filter(regex="^temp_").to_numpy(), weather.filter(regex="^rain_").to_numpy()
    region = pd.get_dummies(weather["region"]).to_numpy(dtype=float)
    K2 = smooth(10, 2)
    learners = [
        (along(np.ones((35, 1)), b), K2, 5.0),
        (along((temp * integration_weights(DAYS)) @ s, b), both(smooth(9, 1), K2), 20.0),
        (along(centered(np.column_stack([np.ones(35), region[:, 1:]])), b), both(np.eye(3), K2), 15.0),
    ]
    chosen, left, fit = boost(learners, rain, 60)
    text = "rain(t) ~ bsignal(temp, knots=5, df=4) + bols(region, df=3)"
    result = model_of(weather, text, penalty="fdboost").fit(steps=60)
    labels = list(result.learners.index)
    assert [labels.index(name) for name in result.path["learner"]] == chosen and len(set(chosen)) > 1
    assert (1.0 - result.rsquared) * result._boosting.total_squares == pytest.approx(left, rel=1e-6)
    np.testing.assert_allclose(result.predict(weather).to_numpy(), fit, atol=1e-6)


def test_warm_and_coastal_stations_are_wet_in_winter(weather):
    model = model_of(weather, "rain(t) ~ bsignal(temp, knots=5) + bols(region)")
    result = model.fit(steps=300, select="cv", folds="site")
    assert 1 < result.mstop < 300
    assert result.entry_test()["p_value"].max() < 0.01
    region = result.surface("region").pivot_table(index="column", columns="t", values="estimate")
    atlantic, pacific = region.loc["region[T.Atlantic]"], region.loc["region[T.Pacific]"]
    january, july = atlantic.index < 31, (atlantic.index > 181) & (atlantic.index < 212)
    assert atlantic[january].mean() > 0.1 and pacific[january].mean() > pacific[july].mean() + 0.1
