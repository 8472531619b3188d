if __name__ == "core":
    raise ImportError("run 'pip install -e .' and import stagewright.core")
