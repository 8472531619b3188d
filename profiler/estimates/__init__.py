"""Profiles without the device: FLOPs and bytes against a catalogue."""
