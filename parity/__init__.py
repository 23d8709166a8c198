"""What holds: runs candidate and reference from shared states, judges every step, explains the first that is wrong."""
