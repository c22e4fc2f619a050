"""Penalised estimates: penalties, groups, coordinate descent, paths."""
