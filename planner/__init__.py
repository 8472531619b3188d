if __name__ == "planner":
    raise ImportError("run 'pip install -e .' and import stagewright.planner")
