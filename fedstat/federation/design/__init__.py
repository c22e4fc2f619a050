"""Designs, agreed before estimation: coding of columns, transforms, levels, rows."""
