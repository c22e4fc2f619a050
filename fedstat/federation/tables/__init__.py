"""Tables of a site: sources, databases, columns, curves, keys and checks.

``sources`` opens the records of a site: a data frame, ``text_files``, Parquet files, or a query of a
``database`` with the rows of ``sql_table``. All are a ``table``, which streams its rows in chunks of
``columns`` or ``curve_columns``; ``curves`` has the values of curves, ``curve_objects`` makes them from those
of other packages. ``keys`` links the records of sites, and an ``aligned_table`` has them in the order of the
common entities. ``checks`` are those of a partition. ``published`` and ``dictionary`` describe columns to
others; ``cardinality`` and ``supports`` count what a column could reveal.
"""
