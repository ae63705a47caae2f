"""What knows argparse, stdin, stdout and exit codes."""
