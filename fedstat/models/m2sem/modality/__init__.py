"""Measurement models of one block of columns: continuous and categorical.

``base`` says what a model of a block does. ``gaussian`` is that of continuous columns, ``categorical`` that
of the others, with parameters of each number of ``levels``.
"""
