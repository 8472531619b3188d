"""The HTTP service: plans, profiles and jobs over REST, and the web page.

It computes no plan itself and never imports torch; `planner` and `profiler` do the work.
"""

if __name__ == "api":
    raise ImportError("run 'pip install -e .' and import stagewright.api")
