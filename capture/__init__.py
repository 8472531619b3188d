if __name__ == "capture":
    raise ImportError("run 'pip install -e .' and import stagewright.capture")
