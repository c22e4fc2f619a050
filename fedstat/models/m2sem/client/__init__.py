"""What one institution holds and does in a mixture."""
