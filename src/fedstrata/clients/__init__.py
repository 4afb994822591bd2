"""Code that runs at the clients, where the data are: handlers of requests, local training, and clients' states."""
