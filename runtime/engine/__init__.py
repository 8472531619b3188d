"""The executor: runs a schedule's actions on stages and moves tensors between ranks.

Cutting the model lives in `partition`, replicas in `replicas`.
"""
