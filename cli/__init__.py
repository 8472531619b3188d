if __name__ == "cli":
    raise ImportError("run 'pip install -e .' and import stagewright.cli")
