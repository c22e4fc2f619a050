"""Three sites with a toy family, and runs of it with receipts."""

import numpy as np
import pandas as pd

import fedstat as fs
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.disclosure.facts import EntityCount
from fedstat.federation.message import ArrayDeclaration, Request, Step
from fedstat.federation.protocols.engine import LocalEngine
from fedstat.federation.protocols.masked_sums import masked_protocol
from fedstat.federation.protocols.receipts import with_receipt

SITES = ("A", "B", "C")
SECRET = 12345.678901


def moments(data, state, weight):
    x = data.frame["x"].to_numpy()
    state.use_columns(["x"])
    state.keep("x", x, len(x))
    return {"sums": np.array([x.sum(), weight[0]]), "gram": np.outer(x[:3], x[:3]), "flag": np.array(1)}


def rows(data, state):
    return {"rows": state.use("x", np.ndarray)}


def report(data, state, text):
    return {}, text.upper()


STEPS = {
    "moments": Step(
        moments,
        {"weight": ArrayDeclaration("per entity", "weights", weighs="")},
        {
            "sums": ArrayDeclaration("aggregate", "sums", maskable=True, behind=(EntityCount,)),
            "gram": ArrayDeclaration("aggregate", "products", 2, behind=(EntityCount,)),
            "flag": ArrayDeclaration("control", "whether all is well", 0),
        },
    ),
    "rows": Step(rows, {}, {"rows": ArrayDeclaration("raw columns", "x itself")}),
    "tell": Step(
        report,
        text_in=ArrayDeclaration("schema", "words"),
        text_out=ArrayDeclaration("schema", "louder words"),
    ),
}


def protocol(session, steps=("tell", "moments")):
    for step in steps:
        arrays = {"weight": np.array([1.0, SECRET])} if step == "moments" else {}
        text = '"words"' if step == "tell" else ""
        yield [Request(site, "toy", step, arrays, session, text) for site in SITES]
    return "fit"


class Study:
    """Three sites, and a coordinator with one ledger per session."""

    def __init__(self, policies=None, at=None):
        table = pd.DataFrame({"site": np.repeat(SITES, 20), "x": SECRET + np.arange(60.0)})
        self.partition = fs.ClientPartition.from_frame(table, by="site", policies=policies)
        self.engine, self.at, self.ledgers = LocalEngine(self.partition.sites), at, {}

    def ledger(self, session):
        return self.ledgers.setdefault(session, Ledger(self.at))

    def run(self, session="s", steps=("tell", "moments"), hidden=False):
        """One run in a session, with its receipt."""
        ledger = self.ledger(session)
        inner = protocol(session, steps)
        inner = masked_protocol(inner, SITES, session) if hidden else inner
        assert self.engine.run(with_receipt(inner, SITES, session, ledger), ledger) == "fit"
        return ledger.receipt

    def verify(self, receipt, strict=False):
        return fs.verify_receipt(receipt, self.partition.fingerprints, strict=strict)
