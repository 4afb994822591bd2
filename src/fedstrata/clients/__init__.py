"""The code that runs at the clients, where the data are: request handlers, local training, and clients' states."""
