"""What the command writes: tables for a terminal, entries of files, and files to fill in."""
