"""Run experiments with NVIDIA FLARE ("NVFlare") across sites, which are processes or organisations with clients' data.

A run uses NVFlare's simulator (``simulator``), several machines (``provision``, ``submit``), one machine in a trial of
a deployment (``local_deployment``), or a single process (``rehearsal``). The modules ``engine``, ``directory``,
``messenger`` and ``relay`` run at the server, and ``site_server`` runs at a site. The module ``job`` connects the
server and the sites to NVFlare's Collab API. Only NVFlare's processes import ``job``. A job contains names of installed
classes, but not code.
"""
