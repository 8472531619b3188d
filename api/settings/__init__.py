"""Settings of the server: types, names, sources and checks; no code here acts on a setting."""
