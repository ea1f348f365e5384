"""Who may see whom: index arithmetic alone, in numpy, no tensor of data and no attention."""
