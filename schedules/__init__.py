if __name__ == "schedules":
    raise ImportError("run 'pip install -e .' and import stagewright.schedules")
