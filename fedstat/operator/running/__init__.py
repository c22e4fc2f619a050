"""What runs a site for long: how it stands for machines, its health, its metrics and its log."""
