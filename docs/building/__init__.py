"""What makes pages that are not written by hand."""
