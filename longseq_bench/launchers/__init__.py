"""What turns a Trial into processes, and a death into a status."""
