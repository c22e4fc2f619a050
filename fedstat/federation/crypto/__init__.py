"""Cryptography: keys, signed and sealed messages, masks and secure products."""
