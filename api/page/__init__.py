"""The page: plans to look at and to change in a browser."""
