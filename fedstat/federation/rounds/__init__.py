"""The engine, and rounds that every protocol may need: keys, masked sums, products, alignment, statements."""
