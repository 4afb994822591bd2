"""Run experiments with NVIDIA FLARE ("NVFlare") across sites (processes or organisations that hold clients' data).

A run uses NVFlare's simulator (module ``simulator``), several machines (``provision``, ``submit``) or a single process
(``rehearsal``). To try a deployment on one machine, use ``local_deployment``. The modules ``engine``, ``directory``,
``messenger`` and ``relay`` run at the server, and ``site_server`` runs at a site. The module ``job`` connects the
server and the sites to NVFlare's Collab API. Only NVFlare's processes import ``job``. A job contains names of installed
classes, but not code.
"""
