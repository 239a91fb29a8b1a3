"""The `octavo` command: one module per subcommand, imported when that subcommand is called."""
