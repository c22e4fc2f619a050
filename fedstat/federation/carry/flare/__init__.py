"""NVIDIA FLARE as the carrier: long-lived site processes on their own machines, over mutual TLS.

One FLARE job serves a whole analysis of several fits. Its server side,
:class:`~fedstat.federation.carry.flare.job.FlareController`, takes questions from the analyst's process and
passes each on to the site that it is meant for; its site side,
:class:`~fedstat.federation.carry.flare.job.FlareExecutor`, holds the site, opened at the start of
the job from the site's own folder (:mod:`fedstat.federation.carry.site_folder`) and kept until the end.
A FLARE client has the name of its site.

The analyst's process and the controller are on the coordinator's machine and talk through a local socket that
its owner alone can open: FLARE's admin session offers commands to the server and none to a running job, and
the analyst as one more FLARE client would need a job process of its own, for every question one hop more.

FLARE knows its machines by their certificates, but lets the clients of a job write to each other. So every
question is signed with the coordinator's key, which the site has pinned, and every answer with the site's
(:mod:`fedstat.federation.crypto.envelopes`): no FLARE client can ask or answer in another's name.

Certificates and kits are made by :mod:`~fedstat.federation.carry.flare.provision`; the job is begun, joined
and ended by :mod:`~fedstat.federation.carry.flare.analysis`.

A message that is lost is sent again under the same number: it may arrive twice, and is computed once
(:class:`~fedstat.federation.carry.remote.SiteServer`). No code travels: the job names two classes, and kits
prepared by :func:`~fedstat.federation.carry.flare.kit.write_local` refuse every job with more in it.
"""
