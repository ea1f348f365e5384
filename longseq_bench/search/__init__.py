"""Search and strategies: which trial to run next, and what a trial is predicted to take."""
