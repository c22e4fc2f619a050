"""Records and their origin: sources, databases, reading, kinds of columns, keys, checks."""
