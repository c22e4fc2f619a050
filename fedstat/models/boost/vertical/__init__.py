"""Boosting where institutions hold different columns: what each makes of its own, and the exchange."""
