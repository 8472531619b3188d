"""Stages of the GPU check, each a program that writes one JSON result."""
