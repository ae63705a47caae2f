"""What the program tells its user: errors that the user can correct, and progress."""
