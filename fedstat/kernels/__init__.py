"""Arrays in, arrays out: the compiled loops."""
