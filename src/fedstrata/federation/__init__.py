"""The interface between a method on the server and its clients: requests, replies, engines and availability."""
