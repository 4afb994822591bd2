"""What a client minimises, one small file each."""
