if __name__ == "client":
    raise ImportError("run 'pip install -e .' and import stagewright.client")
