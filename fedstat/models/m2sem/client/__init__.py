"""What one client holds and does in a mixture."""
