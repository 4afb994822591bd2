"""Experiments over sites with NVIDIA FLARE: its simulator, deployments, and the sites themselves.

The server's side is ``engine``, with ``directory``, ``messenger`` and ``relay``; a site answers in ``site_server``.
``job`` connects both to NVFlare's Collab API, and only NVFlare's processes import it. ``simulator``, ``rehearsal``,
``provision`` and ``local_deployment`` start runs. A job contains no code: it names classes of the installed package.
"""
