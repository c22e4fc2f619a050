"""Boosting from one release with noise (differential privacy).

``protocol`` and ``steps`` make the release, from ``public_curves`` that describe the curves. ``published``
simulates the published algorithm.
"""
