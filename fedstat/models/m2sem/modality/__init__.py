"""What one site holds of a mixture of factor models: a block of columns of one kind, and its M-step."""
