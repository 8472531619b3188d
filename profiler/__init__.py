if __name__ == "profiler":
    raise ImportError("run 'pip install -e .' and import stagewright.profiler")
