"""Where ``nn.Module`` keeps the hooks that run when it is called."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
