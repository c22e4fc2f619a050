"""Tables of a site: sources, databases, columns, curves, keys and checks."""
