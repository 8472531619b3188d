"""A model with its code, timed layer by layer and as a whole."""
