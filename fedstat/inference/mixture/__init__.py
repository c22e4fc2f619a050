"""Statements of mixtures: how well clusters are told apart, and what else differs between them."""
