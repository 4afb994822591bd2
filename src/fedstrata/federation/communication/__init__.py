"""How models and updates travel: codecs, their memories, and the model as what a client missed of it."""
