"""Whom a site and a coordinator take part with: cards, pins, rosters."""
