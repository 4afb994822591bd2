"""The objectives that clients minimise, one small file each."""
