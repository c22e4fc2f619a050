"""NVIDIA FLARE as transport: long-lived site processes on their own machines, over mutual TLS.

One FLARE job serves an analysis of several fits. Its server side,
:class:`~fedstat.federation.transport.flare.job.FlareController`, receives requests from the analyst's process
and forwards each one to its site. Its site side,
:class:`~fedstat.federation.transport.flare.job.FlareExecutor`, holds the site. The site is opened from its
own folder (:mod:`fedstat.federation.transport.site_folder`) when the job starts, and stays open until the job
ends. A FLARE client has the name of its site.

The analyst's process and the controller run on the coordinator's machine. They communicate through a local
socket that only its owner can open. FLARE's admin session sends commands to the server, but not to a running
job. If the analyst were a FLARE client, it would need a job process of its own and one more hop per request.

FLARE identifies machines by their certificates, but the clients of a job can write to each other. Therefore
the coordinator signs every request with a key that the site has pinned, and the site signs every reply
(:mod:`fedstat.federation.crypto.envelopes`). No FLARE client can send a message in another's name.

:mod:`~fedstat.federation.transport.flare.provision` makes certificates and kits, and
:mod:`~fedstat.federation.transport.flare.analysis` starts, joins and ends the job.

A lost message is sent again under the same number. It may arrive twice, but is computed once
(:class:`~fedstat.federation.transport.remote.SiteServer`). No code is transferred: the job names two classes,
and kits prepared by :func:`~fedstat.federation.transport.flare.provision.write_local` refuse other jobs.
"""
