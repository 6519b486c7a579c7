"""Its presence puts this folder on the path of the tests, for the modules that they share."""
