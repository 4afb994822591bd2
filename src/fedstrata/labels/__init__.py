"""Labels as the server sees them: the stratified schedule and who holds what."""
