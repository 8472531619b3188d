if __name__ == "view":
    raise ImportError("run 'pip install -e .' and import stagewright.view")
