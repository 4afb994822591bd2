"""One experiment over real sites with NVIDIA FLARE: its simulator, deployments, and what a site does.

``fedstrata.engines.nvflare`` decides what server and sites say to each other. Here it is mounted on NVFlare's Collab
API (``job``), started (``simulator``, ``provision``, ``trial``) and answered (``site_server``). Only ``job`` is
imported inside NVFlare's processes; nothing here is shipped with a job, which names the installed package.
"""
