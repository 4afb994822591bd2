"""How the server combines what came back."""
