"""Run experiments with NVIDIA FLARE ("NVFlare") across sites: processes or organisations that have the clients' data.

A run uses NVFlare's simulator (``simulator``), several machines (``provision``, ``submit``), a trial of a deployment on
one machine (``local_deployment``), or a single process (``rehearsal``). The modules ``engine``, ``directory``,
``messenger`` and ``relay`` run at the server, and ``site_server`` runs at a site. The module ``job`` connects the
server and the sites to NVFlare's Collab API. Only NVFlare's processes import ``job``. A job does not contain code. It
contains only the names of classes in the installed package.
"""
