"""Tables, pictures and pages about runs, and what the terminal shows while one goes on."""
