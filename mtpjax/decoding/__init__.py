"""Generate: drafters, acceptance rules, and the compiled loop they share."""
