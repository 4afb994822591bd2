"""The code that runs where the data are, at the clients: request handlers, local training, and clients' states."""
