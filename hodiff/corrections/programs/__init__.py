"""Rules for what runs other code: compiled scripts, operators that take functions, torch's own Python."""
