"""A model on the meta device gets memory and values, on each rank only what that rank holds."""
