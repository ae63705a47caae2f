"""Folders that are not on this machine: the Hugging Face hub, buckets, web servers."""
