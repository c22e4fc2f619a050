"""Multiple imputation of missing values by the joint normal model."""

__all__: list[str] = []
