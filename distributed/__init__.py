"""Several processes, one per host, are one computation: how they join, agree, and end together."""
