"""Pipelined inference with many requests in flight, in one process or several; no training."""
