"""Several processes, usually one per host, run one computation: how they join, agree, and end together."""
