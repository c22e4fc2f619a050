"""Multiple imputation: by the joint normal model of columns, and by chained equations of rows."""

from fedstat.models.impute import steps

__all__ = ["steps"]
