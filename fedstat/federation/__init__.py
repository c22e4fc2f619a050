"""Federation: the data of sites, what may be released, and how messages pass."""
