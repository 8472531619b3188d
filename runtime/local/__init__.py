"""Pipelined stages in one process, in GPipe's clock order over one or several devices."""
