"""What runs inside a trial's own process."""
