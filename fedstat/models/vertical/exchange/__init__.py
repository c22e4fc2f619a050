"""The exchange of sums of products between sites with different columns.

Read ``protocol`` (what is requested), then ``patterns`` (which missing patterns), ``steps`` (what a site
answers) and ``standardized_columns`` (what it keeps during a fit).
"""
