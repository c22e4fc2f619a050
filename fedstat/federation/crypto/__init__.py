"""Keys, sealed messages, masks and products: what hides one institution's contribution."""
