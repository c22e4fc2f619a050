"""One analysis that was done several times: on synthetic tables, or on multiply imputed ones."""
