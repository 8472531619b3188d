"""What the replicas of a stage do together: sum gradients, or share the weights themselves."""
