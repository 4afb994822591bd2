"""Experiments over sites (processes or organisations that hold clients' data), with NVIDIA FLARE ("NVFlare").

A run uses NVFlare's simulator or a deployment. The server's side is ``engine``, with ``directory``, ``messenger`` and
``relay``; a site answers in ``site_server``. ``job`` connects both to NVFlare's Collab API, and only NVFlare's
processes import it. ``simulator``, ``rehearsal``, ``provision`` and ``local_deployment`` start runs. A job does not
contain code: it names classes of the installed package.
"""
