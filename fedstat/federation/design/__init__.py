"""Designs, agreed before anything is estimated: coding of columns, transforms, levels, rows."""
