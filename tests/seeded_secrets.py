"""Keys, seeds and nonces that are the same in every run of a test or a vignette.

The noise of private releases, randomized labels, masks and shared seeds all follow from keys. A test
therefore has the same secrets in every run: in any order, in any process, and next to any other test.
Processes that a test starts draw from the operating system.
"""

import os
import secrets
from random import Random

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

SECRETS = Random()
os.register_at_fork(after_in_child=SECRETS.seed)


def draw_from_seeds(replace=setattr):
    """Draw all secrets of this process from `SECRETS`, which is then to be given a seed."""
    replace(secrets, "token_bytes", SECRETS.randbytes)
    replace(secrets, "token_hex", lambda count: SECRETS.randbytes(count).hex())
    replace(secrets, "randbits", SECRETS.getrandbits)
    for kind in (Ed25519PrivateKey, X25519PrivateKey):
        replace(kind, "generate", lambda kind=kind: kind.from_private_bytes(SECRETS.randbytes(32)))
