"""Imports the package and runs its kernels once, so that a process forked after it need not."""

import os
import warnings

import noisy_counts
import pyarrow.parquet
import pytest

import fedstat as fs
from fedstat.federation.disclosure.site import FAMILIES, load_families
from fedstat.operator import command_line

IMPORTED = pyarrow.parquet, pytest, command_line
os.fsync = lambda handle: None  # as in the process of the tests

load_families()
FAMILIES[noisy_counts.FAMILY] = noisy_counts.STEPS
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    patients = fs.ClientPartition.from_frame(fs.datasets.make_hospitals(), by="hospital")
    fs.GLORE.from_formula("num > 0 ~ age", patients).fit()
    fs.FedAvg.from_formula("num > 0 ~ age", patients).fit(rounds=1, seed=1, standardize=True, masked=True)
    study = fs.ClientPartition.from_frames(fs.datasets.load_sme(), on="enterprise_id")
    fs.VFEMRegression.from_formula("NPGR ~ ROA", study).fit(exchange="moments")
