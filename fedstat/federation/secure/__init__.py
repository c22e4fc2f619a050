"""Keys, sealed messages and masked sums: what hides one institution's contribution.

Nothing here is a primitive of our own. Every building block comes from the ``cryptography`` package:

======================  ==========================  =============================================
building block          reference                   used for
======================  ==========================  =============================================
X25519                  RFC 7748                    secrets that two sites share
Ed25519                 RFC 8032                    who offered a key
HKDF with SHA-256       RFC 5869                    one key per pair, session and purpose
ChaCha20-Poly1305       RFC 8439, section 2.8       sealed messages from site to site
ChaCha20                RFC 8439, section 2.4       stream of masks
======================  ==========================  =============================================

Signed ephemeral keys that name the session and everyone in it follow Krawczyk (2003), SIGMA,
doi:10.1007/978-3-540-45146-4_24. Pairwise masks that cancel in the sum are those of Bonawitz et al.
(2017), doi:10.1145/3133956.3133982, section 4, without the part that survives a site's absence.

**Who is held off.** Coordinator and sites are semi-honest: they do what the protocol says, and keep and
combine all that they see. The coordinator relays every message between sites. Should it, or the network,
replace a key or alter, repeat, reorder, cut or divert a sealed message, the receiver raises
:class:`~fedstat.errors.SecurityError`, provided that the fingerprints were compared by another way than
through the coordinator.

**Who may collude with whom.** Masks hide a site among the sites that do *not* collude. The coordinator
together with any c of K sites learns the sum over the other K - c and nothing more, so that one site's part
falls only to all K - 1 others together, once they know the sum. A box is opened by its sender and its
receiver alone; the coordinator may read it if it colludes with, or sits at, either.

**What is not protected.**

* The sums themselves. A sum over few entities, a difference of two sums, or many sums together may disclose;
  that is the matter of the policy (minimum counts, answers kept) and of :mod:`fedstat.privacy`. Two sessions
  over lists of institutions that differ by one give that one's part by subtraction.
* Sums of two sites: each knows its own part, and so the other's; see
  :func:`~fedstat.federation.secure.masks.hides`.
* Sizes, shapes, number and time of messages, names of sites and arrays, numbers of entities.
* The truth of what a site sends: a site that puts in wrong numbers changes the sum, unseen.
* A coordinator that asks each site a different question in the same round: the sum is then one of unlike
  parts. Nor does it stop one that reports a wrong sum.
* Absence: if one site fails to answer, its round gives no sum, and a new session without it must be agreed.
* A computer that is not its owner's alone, or a stolen identity file, from then on. Ephemeral keys are in
  memory only and dropped with the session, so that what passed before stays closed; Python cannot promise to
  overwrite memory. A process must not be forked, nor its memory image run twice, in mid-session.
* A large quantum computer, for traffic that was recorded.
"""
