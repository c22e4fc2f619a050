"""Decisions of a site's owner: the policy, its file, and what follows from a question alone."""
