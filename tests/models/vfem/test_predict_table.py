"""Predictions for rows that the analyst has: a DataFrame instead of a partition."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm

import fedstat as fs
from fedstat.errors import ModelError

DATA = fs.datasets.make_blocks(500, seed=1)
NAMES = [name for site, frame in DATA.frames.items() for name in frame if name not in (DATA.key, "y")]


@pytest.fixture(scope="module")
def partition():
    return fs.ClientPartition.from_frames(DATA.frames, on=DATA.key)


def table_of(partition):
    """The entities of a partition as one table, in the order of its predictions."""
    frames = [frame.set_index(DATA.key) for frame in DATA.frames.values()]
    return pd.concat(frames, axis=1).reindex(partition.entities)


def models(partition):
    binary = {
        site: frame.assign(y=(frame["y"] > 0).astype(int)) if "y" in frame else frame
        for site, frame in DATA.frames.items()
    }
    second = fs.ClientPartition.from_frames(binary, on=DATA.key)
    yield fs.VFEMRegression.from_formula("y ~ .", partition, between="free").fit(), partition
    yield fs.VFEMRegression.from_formula("y ~ .", partition, between="independent").fit(), partition
    yield fs.VFEMGLM.from_formula("y ~ .", second, family=sm.families.Binomial()).fit(), second
    yield fs.VerticalGLM.from_formula("y ~ .", partition, missing="em").fit(n_lambdas=8), partition


def test_a_table_is_predicted_as_the_partition_of_its_rows(partition, tmp_path):
    table = table_of(partition)
    for fit, entities in models(partition):
        there = fit.predict(entities)
        np.testing.assert_allclose(fit.predict(table), there, rtol=1e-10)
        frame = fit.get_prediction(table).summary_frame()
        np.testing.assert_allclose(frame, fit.get_prediction(entities).summary_frame(), rtol=1e-8)
        assert frame.index.equals(table.index) and fit.predict(table).index.equals(table.index)
        # One row, any index, and no site's columns but one; the entity lacks the others.
        one = table[NAMES[:2]].iloc[[3]].set_axis(["firm"])
        found = fit.predict(exog=one)
        assert found.index.tolist() == ["firm"] and np.isfinite(found).all()
        fit.save(tmp_path / "fit.fed")
        np.testing.assert_allclose(fs.load(tmp_path / "fit.fed").predict(table), there, rtol=1e-10)


def test_an_entity_that_every_site_lacks_has_the_mean(partition):
    fit = fs.VFEMRegression.from_formula("y ~ .", partition).fit()
    rows = table_of(partition)[NAMES].iloc[:3].copy()
    rows.iloc[1] = np.nan
    found = fit.predict(rows)
    assert found.iloc[1] == pytest.approx(fit._fit.a)


def test_errors_of_a_table(partition):
    fit = fs.VFEMRegression.from_formula("y ~ .", partition).fit()
    with pytest.raises(ModelError, match="no value in a column of the fit, which are"):
        fit.predict(pd.DataFrame({"other": [1.0]}))
    with pytest.raises(ModelError, match="entities at the sites are a ClientPartition"):
        fit.predict([1.0, 2.0])
