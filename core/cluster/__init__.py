"""Clusters: devices, links, accelerator data sheets and their shorthand.

Profiles and plans live in their own folders.
"""
