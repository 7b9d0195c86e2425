"""Model families over one shared decoder. Importing the package loads nothing heavy."""
