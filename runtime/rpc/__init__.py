"""Pipelined training from one controlling process, over ``torch.distributed.rpc``."""

from .calls import StageError as StageError
from .pipeline import RpcPipeline as RpcPipeline
from .session import controller as controller
from .session import serve as serve

__all__ = ["RpcPipeline", "StageError", "controller", "serve"]
