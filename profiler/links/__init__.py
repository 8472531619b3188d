"""How fast the links between processes are, fitted into a cluster."""
