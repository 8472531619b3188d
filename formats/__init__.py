if __name__ == "formats":
    raise ImportError("run 'pip install -e .' and import stagewright.formats")
