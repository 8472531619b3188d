if __name__ == "runtime":
    raise ImportError("run 'pip install -e .' and import stagewright.runtime")
