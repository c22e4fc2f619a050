"""Code shared by models of sites with different columns.

A ``model`` parses a formula, and a ``layout`` says which site has which columns and entities. ``exchange``
requests sums of products by missing pattern, of which ``pattern_merging`` merges the small ones; these are
the ``moments`` of ``joint_normal``, which ``newton`` maximizes. ``prediction`` has linear predictors,
evaluation and marginal effects. ``group_folds`` keeps groups together in cross-validation; ``notes`` are
shared by summaries.
"""
