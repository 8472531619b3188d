"""Exports of profiles and plans to other tools' formats.

Nothing here computes; it rewrites documents.
"""

if __name__ == "formats":
    raise ImportError("run 'pip install -e .' and import stagewright.formats")
