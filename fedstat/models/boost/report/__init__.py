"""Effects, predictions, plots and refits from the sums of boosting.

``record`` is what a file holds. ``refit`` gives surfaces with errors, ``effects`` tables of them,
``prediction`` means of new rows, and ``plots`` the pictures.
"""
