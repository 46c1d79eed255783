"""A folder for PYTHONPATH: Python imports the sitecustomize in it at the start of every process."""
