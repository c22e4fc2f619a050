"""AUC and Brier score of predicted survival from pooled rows: an oracle in a few lines of numpy."""

import numpy as np


def censoring(times, event, at, before=False):
    """Kaplan and Meier's estimate of P(C > t), or P(C >= t), where events come before censored rows."""
    out = np.ones(len(at))
    for one in np.unique(times[~event]):
        stays = 1.0 - ((times == one) & ~event).sum() / (
            (times >= one).sum() - ((times == one) & event).sum()
        )
        out *= np.where(one < at if before else one <= at, stays, 1.0)
    return out


def scores(times, event, eta, survival, t):
    """AUC (ties count one half), Brier score and its value for Kaplan-Meier at a time."""
    at = np.full(1, t)
    cases, controls = event & (times <= t), times > t
    w = np.where(cases, 1.0 / censoring(times, event, times, before=True), 0.0)
    free = censoring(times, event, at)[0]
    above = (eta[cases][:, None] > eta[controls]) + 0.5 * (eta[cases][:, None] == eta[controls])
    auc = (w[cases] @ above).sum() / (w[cases].sum() * controls.sum())
    km = 1.0 - w[cases].sum() / len(times)
    brier, null = (
        (
            w[cases] @ np.broadcast_to(s, len(times))[cases] ** 2
            + ((1.0 - np.broadcast_to(s, len(times))[controls]) ** 2).sum() / free
        )
        / len(times)
        for s in (survival, km)
    )
    return auc, brier, null
