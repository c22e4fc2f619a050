"""The joint normal model of columns with missing blocks.

Read ``fit`` (from moments to estimates with errors), then ``model`` (points, derivatives and the maximum). A
point is one of ``likelihood`` (free covariances, whose information ``products`` solves with where columns are
many) or of ``blocks`` (independent sites, in closed form);
``edges`` says which covariances are free. ``assumption_tests`` and ``corrections`` examine and correct a fit.
"""
