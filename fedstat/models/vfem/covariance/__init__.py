"""Standard errors of a fit by iteration.

``protocol`` chooses how: ``from_moments`` without further requests, ``information`` from scores
(``score_steps``), or ``sem_protocol`` with ``steps`` by differentiating the iteration. ``cross_products`` are
those of two sites' columns.
"""
