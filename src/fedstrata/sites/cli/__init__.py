"""The commands of a deployment."""
