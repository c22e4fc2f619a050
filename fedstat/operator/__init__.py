"""The command ``fedstat``: it runs sites as services and manages federations."""
