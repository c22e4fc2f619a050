"""Paths of penalised fits: what is penalised, how fits are compared and chosen."""
