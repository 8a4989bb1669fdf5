"""What every package may use: errors, units, scopes, the clock's rules, configuration files."""
