"""Predictions for new entities of sites with different columns.

``predictor`` is what results inherit. ``protocol`` and ``steps`` give linear predictors, ``evaluation``
compares them with responses, and ``marginal_effects`` averages changes of means; ``response`` states the mean
of each model as a function of its predictor.
"""
