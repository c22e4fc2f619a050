"""Disclosure control: the site, its policy, and the checks that decide what may be released.

A request enters by ``site`` (:meth:`Site.answer <fedstat.federation.disclosure.site.Site.answer>`) and passes
the checks that ``checks`` lists in order. Read in this order:

* ``rules``, ``policy``: what an owner can set; ``threat_statements``: what each party learns without a rule.
* ``family``, ``facts``: how a step declares what it releases, and the facts that it reports about the rows.
* ``checks``: the order of all checks; ``request_checks`` need no row, ``row_checks`` and ``leverage`` examine
  the rows behind a release.
* ``differencing``, ``weight_spaces``, ``cell_functions``, ``weighted_sums``, ``column_sums``: comparisons
  with earlier releases, which ``release_history`` keeps; ``analysis_sets``: rows that are left out, so that
  analyses do not differ by few.
* ``level_products``: comparison with the rows of other sites that mask the same sums.
* ``privacy_budget``: noise and its charge.
* ``approval``: studies, roles and plans that an owner decides about.
* ``state``: what a site keeps of a session; ``refusals``: what an analyst and the owner read.
"""
