"""The cache: the manager decides, the controller moves."""
