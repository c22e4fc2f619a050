"""Where records come from: sources, databases, reading, kinds of columns, keys, checks."""
