"""What `verify.sh` runs: checks of environment, patches, weights and a running server, a module a group."""
