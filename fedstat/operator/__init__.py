"""The command ``fedstat``: sites as services, and federations of them."""
