"""The interface between a method (on the server) and the clients: requests, replies, engines and availability."""
