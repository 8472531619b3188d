if __name__ == "api":
    raise ImportError("run 'pip install -e .' and import stagewright.api")
