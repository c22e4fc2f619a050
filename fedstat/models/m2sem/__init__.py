"""Clusters over modalities of mixed type at several institutions (M2-SEM)."""
