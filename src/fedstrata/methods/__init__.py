"""The federated methods, one file each; most are recipes of four choices."""
