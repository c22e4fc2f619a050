"""Cluster membership of new entities, from the modalities that are available for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd
from scipy.special import softmax

from fedstat.codec import to_json
from fedstat.errors import ModelError
from fedstat.federation.audit.ledger import Ledger
from fedstat.federation.crypto.masks import hides
from fedstat.federation.design.coding import BlockSpec
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.masked_sums import masked_protocol as mask_sums
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.models.checks import check_layout
from fedstat.models.m2sem.analyses import analysis_of
from fedstat.models.m2sem.em import EntityIndex, add_exactly
from fedstat.models.m2sem.record import FittedSite, M2SEMRecord
from fedstat.models.m2sem.request import FAMILY, OpenNewRowsRequest, OpenRequest, PredictRequest
from fedstat.models.m2sem.specification import ColumnsSchema, who_has_whom
from fedstat.models.run import run_analysis
from fedstat.models.vertical.prediction.predictor import NewEntities, entities_of
from fedstat.typing import Floats, Ints


def predict_clusters(record: M2SEMRecord, exog: NewEntities) -> pd.DataFrame:
    """Probabilities of clusters of new entities, (n, K); the shares if no site has an entity."""
    partition, index = entities_of(exog, {site: _columns_of(held) for site, held in record.sites.items()})
    check_layout("predict()", partition, "vertical")
    fitted = present(record, partition)
    session = partition._new_session()
    at = partition.coordinator or "apart"
    ledger = Ledger(None if at == "apart" else at)
    requester = SecureProductSession(FAMILY, session, ledger.at)
    subjects, here = partition.engine.run(open_modalities(requester, fitted, partition), ledger)
    request = partial(request_densities, requester, record, fitted, subjects)

    def protocol() -> FitProtocol[Floats]:
        return mask_sums(request(), subjects.sites, session) if hides(len(fitted)) else request()

    K = len(record.shares)
    shapes = {site: {"differences": (subjects.total, K - 1)} for site in fitted}
    call = f"M2SEMResults.predict({subjects.total:,} entities)"
    columns = {site: _columns_of(held) for site, held in fitted.items()}
    analysis = analysis_of(partition, call, f"{K} clusters", columns, "predict_densities", shapes)
    D = np.zeros((partition.n_entities, K - 1))
    D[here] = run_analysis(analysis, protocol, ledger)
    r = softmax(np.log(record.shares) + np.column_stack([D, np.zeros(len(D))]), axis=1)
    return pd.DataFrame(r, index=index, columns=record.clusters)


def present(record: M2SEMRecord, partition: ClientPartition) -> dict[str, FittedSite]:
    """Return the sites of the fit that the partition has, each with all of its columns."""
    fitted = {site: held for site, held in record.sites.items() if site in partition.columns}
    if not fitted:
        raise ModelError(
            f"predict(): expected a partition with some of the sites {', '.join(record.sites)}; it has "
            f"{', '.join(partition.sites)}"
        )
    for site, held in fitted.items():
        absent = [name for name in _columns_of(held) if name not in partition.columns[site]]
        if absent:
            raise ModelError(
                f"predict(): '{site}' lacks column {', '.join(map(repr, absent[:8]))} of the fit. A site "
                "must have all of its columns, where cells may be missing, or be left out"
            )
    return fitted


def _columns_of(held: FittedSite) -> list[str]:
    """Columns of a site, and the columns from which its covariates are computed."""
    adjust = BlockSpec.from_json(held.coding).columns if held.coding else ()
    return [*(name for one in held.modalities for name in one.names), *adjust]


def _opening(held: FittedSite) -> tuple[str, str]:
    """Return the step by which a site opens its columns, and its text."""
    if held.coding:
        return "open_new_columns", to_json(OpenNewRowsRequest(held.modalities, held.coding))
    return "open_columns", to_json(OpenRequest(held.modalities))


def open_modalities(
    requester: SecureProductSession, fitted: Mapping[str, FittedSite], partition: ClientPartition
) -> FitProtocol[tuple[EntityIndex, Ints]]:
    """Open columns of all sites; return each site's entities, and the entities that any site has."""
    modalities = {site: fitted[site].modalities for site in sorted(fitted)}
    replies = yield [requester.request(c, *_opening(fitted[c])) for c in modalities]
    agreed = ColumnsSchema(modalities, {reply.site: reply.arrays["seen"] for reply in replies})
    return who_has_whom(agreed, partition.rows, partition.n_entities, {}, nobody=True)


def request_densities(
    requester: SecureProductSession,
    record: M2SEMRecord,
    fitted: Mapping[str, FittedSite],
    subjects: EntityIndex,
) -> FitProtocol[Floats]:
    """Request differences of log densities of the subjects, (N, K - 1)."""
    text = to_json(PredictRequest(len(record.shares), record.factors, record.nodes))
    replies = yield [
        requester.request(
            c,
            "predict_densities",
            text,
            place=subjects.place[c],
            total=np.array(subjects.total),
            parameters=fitted[c].parameters,
            units=fitted[c].units,
            **({"covariates": fitted[c].spread} if fitted[c].coding else {}),
        )
        for c in subjects.sites
    ]
    return add_exactly([reply.arrays["differences"] for reply in replies])
