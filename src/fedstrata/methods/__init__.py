"""One file a method; most are a recipe of four choices."""
