//! Volumes with forks that were not unmounted: what the log changes in each tree.
