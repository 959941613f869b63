"""fly's own subcommands. Each module has `add_command(subparsers)`; heavy imports wait in it."""
