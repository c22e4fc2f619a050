"""Protocols that several families need: keys, masked sums, secure products, linkage, receipts."""
