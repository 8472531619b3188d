"""What a model may be given as, and how it becomes a profile; none of it runs the caller's code."""
