"""What clients may use at once: turns at work, and shares of memory and streams."""
