"""Evaluation of predictions by set of sites, and permutation importance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import expit, logit

from fedstat.codec import to_json
from fedstat.errors import DataWarning, ModelError, NotAvailableError, warn
from fedstat.federation.design.vertical_design import design_request
from fedstat.federation.partition.partition import ClientPartition
from fedstat.federation.protocols.engine import FitProtocol
from fedstat.federation.protocols.secure_products import SecureProductSession
from fedstat.inference.discrimination import discrimination
from fedstat.inference.evaluation import Evaluation, probabilities, shapley_values
from fedstat.inference.notes import Catalogue, Note
from fedstat.inference.recalibration import recalibrate_bins
from fedstat.inference.summary import Report
from fedstat.inference.tables import Sheet
from fedstat.kernels.glm.distributions import DistributionSpec
from fedstat.models.checks import check_choice, check_level
from fedstat.models.laser.prediction import FittedNetworks, hidden, open_networks, predicted
from fedstat.models.laser.request import FAMILY
from fedstat.models.laser.scoring import ScoreCounts, read_scores, score_edges
from fedstat.models.laser.training import members_of
from fedstat.models.run import run_analysis
from fedstat.models.vertical.prediction.protocol import OpenedBlocks, ResponseSource, new_ledger
from fedstat.typing import Bools, Floats

NOTES = Catalogue(
    info={
        "counted": "Counted at the site that holds the response; sets with too few entities have -.",
        "least": "The policy of that site requires that similar predictions are averaged over {least} or "
        "more entities before they are counted.",
    },
)


# ----------------------------------------------------------------------------------------------------
# Agreement of predictions with the response of a partition, computed at the site that holds it.


def count_predictions(
    fitted: FittedNetworks,
    response: ResponseSource,
    partition: ClientPartition,
    call: str = "evaluate()",
    permuted: Sequence[tuple[str, int] | None] = (None,),
) -> list[ScoreCounts]:
    """Evaluate predictions against the response of a partition, by set of sites.

    This happens once for each site whose columns are `permuted`, by a number, and once without (None).
    """
    holder = response.site
    if holder not in partition.sites:
        raise ModelError(f"{call}: the partition lacks site '{holder}', which has the response")

    def requester() -> FitProtocol[list[ScoreCounts]]:
        opened = yield from open_networks(fitted, partition)
        question = {"response": response.text, "columns": response.columns}
        (reply,) = yield [design_request(holder, "open_response", opened.session, question)]
        return (yield from hidden(fitted, opened, counting(opened, reply.arrays["has"])))

    def counting(opened: OpenedBlocks, has: Bools) -> FitProtocol[list[ScoreCounts]]:
        counts = []
        for one in permuted:
            found = yield from predicted(fitted, opened, partition, permuted=one)
            rows = partition.rows[holder]
            use = found.sets[rows] > 0
            sets, code = np.unique(found.sets[rows[use]], return_inverse=True)
            units = np.array([fitted.trained.mean, fitted.trained.sd, len(sets)])
            arrays = {"predicted": found.predicted[rows[use]], "use": use, "code": code, "units": units}
            to = SecureProductSession(FAMILY, opened.session, None)
            (reply,) = yield [to.request(holder, "score", to_json(fitted.trained.outcome), **arrays)]
            counts.append(read_scores(reply, sets))
            if len(counts) == 1:
                request = np.bincount(code[has[use]], minlength=len(sets))
                # Sets with too few entities have no counts.
                other = int((request - counts[0].n)[counts[0].n > 0].sum())
                if other:
                    warn(
                        f"{call}: {other:,} entities do not count: their '{response.text}' at '{holder}' is "
                        "of a class that does not occur in the fit; leave them out, or fit with some of them",
                        DataWarning,
                    )
        return counts

    analysis = fitted.analysis(call, partition)
    columns = {**analysis.columns, holder: (*analysis.columns.get(holder, ()), *response.columns)}
    analysis = replace(analysis, columns=columns)
    return run_analysis(analysis, requester, new_ledger(partition, holder))


# ----------------------------------------------------------------------------------------------------
# Quality of the predictions from each set of sites: from counts of scores, not from rows.

LOGIT = DistributionSpec("Binomial", "Logit")
BINNED = "Calibration slope and intercepts use the mean prediction of each bin for its entities."
Criterion: TypeAlias = Literal["f1", "youden"]


def check_threshold(threshold: float, classes: int) -> None:
    """Refuse a value that is not a probability, and a threshold unless the response has two classes."""
    if classes != 2:
        raise ModelError("threshold: the response does not have two classes")
    check_level("threshold", threshold)


def set_name(sites: int, names: Sequence[str]) -> str:
    """Write a set of sites, as in "A + B"."""
    return " + ".join(names[k] for k in members_of(sites))


@dataclass(frozen=True, slots=True, eq=False)
class SetEvaluation(Report):
    """Agreement of predictions with a response, by set of sites.

    Parameters
    ----------
    scores : ScoreCounts
    sites : tuple of str
    classes : tuple of float
        Classes of the response; none for a normal one.
    sd : float
        Standard deviation of a normal response, which is the unit of its binned residuals.
    least : int
        Smallest number of entities over which predictions were averaged before the evaluation, as owners
        require who allow one evaluation; 0 without averaging.

    Examples
    --------
    >>> import fedstat as fs
    >>> data = fs.datasets.make_blocks(800, missing=[0.0, 0.0, 0.0], seed=1)
    >>> partition = fs.ClientPartition.from_frames(data.frames, on=data.key)
    >>> model = fs.LASER.from_formula("y > 0 ~ .", partition, hidden=[4], width=2)
    >>> judged = model.fit(epochs=3, seed=0).evaluate(partition)
    >>> judged.names[-1], judged.to_frame().shape, "auc" in judged.figures, "A" in judged.summary().as_text()
    ('A + B + C', (1, 8), True, True)
    >>> judged.evaluation().auc > 0.5, 0.0 < judged.threshold() < 1.0, judged.worth_with("A") > 0.0
    (True, True, True)
    >>> try:
    ...     judged.values()
    ... except fs.errors.NotAvailableError as error:
    ...     print("not all sets were counted")
    not all sets were counted
    """

    scores: ScoreCounts
    sites: tuple[str, ...]
    classes: tuple[float, ...]
    sd: float = 1.0
    least: int = 0

    @property
    def names(self) -> list[str]:
        """Sets of sites, as in "A + B"."""
        return [set_name(s, self.sites) for s in self.scores.sets.tolist()]

    def to_frame(self, threshold: float | None = None) -> pd.DataFrame:
        """One row per set of sites.

        Parameters
        ----------
        threshold : float, optional
            For two classes, the probability above which the second is predicted, for ``accuracy`` and ``f1``;
            the nearest edge of the bins is used. The default is one half.

        Returns
        -------
        DataFrame
            ``n``; for classes ``accuracy``, ``f1`` (of the second of two classes, otherwise the mean over
            classes), ``log_loss``, ``brier``, and for two classes ``auc`` with its 95 % interval (Hanley and
            McNeil 1982 with estimated probabilities; it differs from DeLong, DeLong and Clarke-Pearson 1988
            by terms that vanish faster than one over the number of entities; see
            :class:`fedstat.inference.evaluation.Evaluation`); for a normal response ``rmse`` and
            ``rsquared``, which uses the variance of the fit. nan if there were too few entities to count.
        """
        scores, n = self.scores, self.scores.n
        confusion = scores.confusion
        if threshold is not None:
            check_threshold(threshold, len(self.classes))
            at = int(np.abs(score_edges(2) - logit(threshold)).argmin())
            confusion = np.stack([self._confusions(g)[:, :, at] for g in range(len(n))])
        frame = pd.DataFrame({"n": n.astype(int)}, index=pd.Index(self.names, name="set"))
        with np.errstate(divide="ignore", invalid="ignore"):
            loss, second = (scores.losses / n[:, None]).T
            if not self.classes:
                return frame.assign(rmse=self.sd * np.sqrt(second), rsquared=1.0 - second)
            frame["accuracy"] = np.trace(confusion, axis1=1, axis2=2) / n
            frame["f1"] = self._f1(confusion)
        frame["log_loss"], frame["brier"] = loss, second / (2.0 if len(self.classes) == 2 else 1.0)
        if len(self.classes) == 2:
            found = [discrimination(*self._by_event(g)) for g in range(len(n))]
            frame["auc"] = [one.auc for one in found]
            frame["auc_low"], frame["auc_high"] = np.transpose([one.conf_int() for one in found]).reshape(
                2, -1
            )
        return frame

    def _confusions(self, g: int) -> Floats:
        """Entities by class and predicted class at every edge of the bins as threshold, (2, 2, B - 1)."""
        below = self.scores.bins[g].cumsum(axis=1)
        return np.stack([below[:, :-1], below[:, -1:] - below[:, :-1]], axis=1)

    def threshold(self, of: str | None = None, by: Criterion = "f1") -> float:
        """Choose the probability above which to predict the second of two classes.

        Choose it on entities that were not used for training, such as those of ``result.calibration``, and
        not on those that are used to evaluate predictions afterwards.

        Parameters
        ----------
        of : str, optional
            A set of sites; the default is the largest that was counted.
        by : {"f1", "youden"}
            Criterion to maximize: F1 of the second class, or sensitivity plus specificity (Youden 1950).

        Raises
        ------
        NotAvailableError
            The response does not have two classes, or the set was not counted.
        ModelError
            There is no such criterion.
        """
        check_choice("by", by, get_args(Criterion))
        confusions = self._confusions(self._counted(of))
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = confusions / confusions.sum(axis=1, keepdims=True)
            f1 = 2.0 * confusions[1, 1] / (confusions[1, 1] + confusions[:, 1].sum(axis=0) + confusions[1, 0])
            value = np.nan_to_num(f1 if by == "f1" else shares[0, 0] + shares[1, 1])
        # All edges between two nonempty counts are equivalent: take the middle one.
        best = np.flatnonzero(value >= value.max() * (1.0 - 1e-12))
        run = best[: 1 + int(np.argmax(np.append(np.diff(best) > 1, True)))]
        return float(expit(score_edges(2)[run[len(run) // 2]]))

    def _f1(self, C: Floats) -> Floats:
        hits = np.diagonal(C, axis1=1, axis2=2)
        f1 = 2.0 * hits / (C.sum(axis=1) + C.sum(axis=2))
        return np.asarray(f1[:, 1] if len(self.classes) == 2 else np.nanmean(f1, axis=1))

    def _by_event(self, g: int) -> tuple[Floats, Floats]:
        """Events and others by bin of the log odds of an event, (1, B) each."""
        others, events = self.scores.bins[g]
        return events[None], others[None]

    def evaluation(self, of: str | None = None) -> Evaluation:
        """Discrimination and calibration of one set of sites; the default is the largest that was counted.

        Raises
        ------
        NotAvailableError
            The response does not have two classes, or the set was not counted.
        """
        g = self._counted(of)
        events, others = self._by_event(g)
        sums = self.scores.expected[g].sum(axis=0)[None]
        edges = np.concatenate([[-np.inf], score_edges(2), [np.inf]])
        n, squares = events + others, self.scores.losses[g, 1] / 2.0
        return Evaluation(
            edges=edges,
            sites=(self.names[g],),
            n=n,
            observed=events,
            expected=sums,
            means=probabilities(edges, LOGIT),
            squares=np.array([squares, squares]),
            recalibration=recalibrate_bins(n[0], events[0], sums[0], LOGIT),
            remarks=(BINNED,),
        )

    def _counted(self, of: str | None) -> int:
        """Find the number of a set of sites; the default is the largest that was counted."""
        if len(self.classes) != 2:
            raise NotAvailableError(
                "no AUC, calibration or threshold: the response does not have two classes"
            )
        counted = [name for name, n in zip(self.names, self.scores.n.tolist(), strict=True) if n]
        if not counted or (of is not None and of not in counted):
            raise NotAvailableError(
                f"expected one of the sets {', '.join(map(repr, counted))}, received {of!r}"
            )
        return self.names.index(of or max(counted, key=lambda name: name.count(" + ")))

    def values(self) -> pd.Series:
        """Shapley values of the sites.

        Shares of the area under the ROC curve beyond one half, of the accuracy beyond that of the most
        frequent class, or of R-squared; by site, averaged over all orders in which sites may join (Shapley
        1953).

        Raises
        ------
        NotAvailableError
            Not all sets of sites were counted.
        """
        K = len(self.sites)
        worth = {0: 0.0, **dict(zip(self.scores.sets.tolist(), self._worth(), strict=True))}
        absent = [s for s in range(1, 1 << K) if not np.isfinite(worth.get(s, np.nan))]
        if absent:
            raise NotAvailableError(
                f"Shapley values need counts for every set of sites; of {(1 << K) - 1} sets {len(absent)} "
                f"have too few entities, or of one class only, such as {set_name(absent[0], self.sites)}"
            )
        return pd.Series(shapley_values(worth, K), index=list(self.sites), name="value")

    def _worth(self) -> list[float]:
        frame = self.to_frame()
        if "auc" in frame:
            return list(frame["auc"] - 0.5)
        if "rsquared" in frame:
            return list(frame["rsquared"])
        most = self.scores.confusion.sum(axis=2).max(axis=1) / self.scores.n
        return list(frame["accuracy"] - most)

    @property
    def figures(self) -> dict[str, float]:
        """Evaluate the predictions of the largest set of sites that was counted; empty if there is none."""
        frame = self.to_frame()
        size = [str(name).count(" + ") if n else -1 for name, n in frame["n"].items()]
        if max(size, default=-1) < 0:
            return {}
        return {str(name): float(value) for name, value in frame.iloc[int(np.argmax(size))].items()}

    def worth_with(self, site: str) -> float:
        """AUC beyond one half, R-squared, or accuracy beyond the largest class, if a site took part."""
        with_site = self.scores.sets >> self.sites.index(site) & 1 == 1
        return replace(self, scores=self.scores.together(with_site))._worth()[0]

    def _sheets(self, entities: str = "") -> Iterator[Sheet]:
        """One line per set; the title may state whose predictions were counted."""
        frame = self.to_frame()
        heads = ("sites", *frame.columns)
        rows = tuple(
            (str(name), f"{int(row.iloc[0]):,}", *("-" if np.isnan(v) else f"{v:.3f}" for v in row.iloc[1:]))
            for name, row in frame.iterrows()
        )
        widths = (34, *[8] * len(frame.columns))
        yield Sheet(
            heads,
            rows,
            "l" + "r" * len(frame.columns),
            widths,
            f"Predictions by set of sites{entities}",
            wrap=True,
        )

    def _summary_notes(self) -> Iterator[Note]:
        yield NOTES.note("counted")
        if self.least:
            yield NOTES.note("least", least=self.least)

    def tidy(self) -> pd.DataFrame:
        """Quality of predictions, a row for each set of sites.

        Returns
        -------
        DataFrame
            ``sites``, the names of the set, and the columns of :meth:`to_frame`.
        """
        return self.to_frame().rename_axis("sites").reset_index()

    def _glance(self) -> dict[str, Any]:
        return {"n_sites": len(self.sites), **self.figures}

    def __repr__(self) -> str:
        return f"<SetEvaluation: {len(self.scores.sets)} sets of sites; see .summary()>"


# ----------------------------------------------------------------------------------------------------
# Loss of predictive quality if a site's columns are permuted between entities.


def permutation_importance(
    fitted: FittedNetworks, response: ResponseSource, partition: ClientPartition, repeats: int, alpha: float
) -> pd.DataFrame:
    """Loss of AUC, accuracy or R-squared by site, over permutations of its columns (Breiman 2001)."""
    sites = [k for k in fitted.sites if k in partition.sites]
    permuted = [(k, number) for k in sites for number in range(1, repeats + 1)]
    first, *counts = count_predictions(
        fitted, response, partition, f"importance(repeats={repeats})", [None, *permuted]
    )
    outcome = fitted.trained.outcome

    def worth(scores: ScoreCounts, site: str) -> float:
        return SetEvaluation(scores, fitted.sites, outcome.classes, fitted.trained.sd).worth_with(site)

    rows, t = [], float(stats.t.isf(alpha / 2.0, repeats - 1))
    for k, of_site in zip(sites, np.array_split(np.arange(len(counts)), len(sites)), strict=True):
        lost = np.array([worth(first, k) - worth(counts[i], k) for i in of_site])
        mean, error = lost.mean(), lost.std(ddof=1) / np.sqrt(repeats)
        rows.append((mean, error, mean - t * error, mean + t * error))
    return pd.DataFrame(
        rows, index=pd.Index(sites, name="site"), columns=["importance", "std_error", "low", "high"]
    )
