"""Dry run: what ``explain()`` executes to list the requests and releases of a fit."""
