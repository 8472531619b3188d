"""Pictures of profiles and plans: HTML, SVG, terminal and notebook.

Nothing here computes a figure that is not in a document or simulated by `planner`.
"""

if __name__ == "view":
    raise ImportError("run 'pip install -e .' and import stagewright.view")
