"""Python clients of the service, blocking and asynchronous.

They know the documents of `core` and nothing of the server's code.
"""

if __name__ == "client":
    raise ImportError("run 'pip install -e .' and import stagewright.client")
