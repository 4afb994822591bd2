"""Clients at real sites, reached through NVIDIA FLARE: what crosses the wire, and the server's side of it.

NVFlare is the transport and nothing else. What it carries are the bytes of our own records, in one published call
each way, so that nothing from another party is ever unpickled. ``fedstrata.deploy`` mounts this on NVFlare's Collab
API; nothing here imports it.
"""
