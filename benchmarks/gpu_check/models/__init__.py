"""Models of the GPU check, in plain torch: no other package has to be on the machine."""
