"""What protocols ask of every site: engine, key agreement, masked sums, products, alignment, statements."""
