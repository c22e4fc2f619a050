"""Sites in other processes: doors at a distance, folders, journals."""
