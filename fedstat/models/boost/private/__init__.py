"""Boosting from one release with noise, over institutions that hold different columns."""
