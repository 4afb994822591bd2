"""Experiments over sites (processes or organisations that have the clients' data), with NVIDIA FLARE ("NVFlare").

A run uses NVFlare's simulator (``simulator``), real machines (``provision``, ``submit``), a trial of a deployment on
one machine (``local_deployment``), or a single process (``rehearsal``). ``engine``, ``directory``, ``messenger`` and
``relay`` run at the server, and ``site_server`` runs at a site. ``job`` connects the server and the sites to NVFlare's
Collab API. Only NVFlare's processes import ``job``. A job does not contain code: it names classes of the installed
package.
"""
